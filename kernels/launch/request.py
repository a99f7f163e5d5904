"""`Request`: the checked arguments of a public call, which all later code uses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument
from fsbench.kernels.checks.tensors import (
    as_counter,
    check_bias,
    check_counter,
    check_mask,
    check_matrices,
    check_temperature,
)
from fsbench.kernels.checks.values import MAX_SAMPLES, check_integer, check_noise, check_number
from fsbench.kernels.launch.quantized import LARGEST_NUMBERS, QuantizedHead
from fsbench.kernels.shard.vocab_shard import VocabShard

SAMPLES_AT_ONCE = 4
"""Samples whose candidates a program keeps in registers; more take further launches."""

SMALLEST = 2.0**-120
"""Lower temperatures are greedy: noise.contract.SMALLEST_TEMPERATURE, for code without Triton."""

_CONVERTED_NUMBERS = 2**20
"""Entries of a weight that are converted to fp32 at once: 4 MiB."""


class Request(NamedTuple):
    """The checked arguments of `flash_sample`, and some that its internals use.

    Attributes:
        weight: the weight, or the rows of `shard`, or the numbers of a QuantizedHead.
        noise: "group" or "token". "target" scores the tokens in seed, int64 [B, num_samples],
            instead of drawing.
        shard: the VocabShard, or None.
        merge_later: return packed candidates (noise.keys) of this weight in place of tokens.
        scale: the scales of a QuantizedHead, or None.
    """

    hidden: Tensor
    weight: Tensor
    seed: Tensor
    offset: Tensor | None
    temperature: float | Tensor
    soft_cap: float | None
    bias: Tensor | None
    mask: Tensor | None
    vocab_size: int
    num_samples: int
    noise: str
    shard: VocabShard | None = None
    merge_later: bool = False
    scale: Tensor | None = None

    def steps(self) -> Tensor:
        """Return the offset, int64 [1] or [B]; 0 if it is None."""
        if self.offset is not None:
            return self.offset
        return torch.zeros(1, dtype=torch.int64, device=self.hidden.device)


class Filters(NamedTuple):
    """The checked filters of `truncated_sample`; top_k is 0 if it is off."""

    top_k: int | Tensor
    top_p: float | Tensor
    min_p: float | Tensor

    def keep_all(self) -> bool:
        """Return whether no filter removes a token, in any row; tensors always may."""
        top_k, top_p, min_p = self
        if isinstance(top_k, Tensor) or isinstance(top_p, Tensor) or isinstance(min_p, Tensor):
            return False
        return top_k == 0 and top_p >= 1.0 and min_p <= 0.0


def greedy(request: Request) -> bool:
    """Return whether all rows are greedy, so that no noise is needed."""
    temperature = request.temperature
    return not isinstance(temperature, Tensor) and temperature < SMALLEST


def changes_logits(request: Request) -> bool:
    """Return whether the request has a bias or a mask, which take a kernel more registers."""
    return request.bias is not None or request.mask is not None


def unchecked_request(
    hidden: Tensor,
    weight: Tensor | VocabShard | QuantizedHead,
    *,
    seed: Any,
    offset: Any,
    temperature: float | Tensor,
    soft_cap: float | None,
    bias: Tensor | None,
    mask: Tensor | None,
    vocab_size: int | None,
    num_samples: int = 1,
    noise: str = "group",
    may_be_sharded: bool = False,
    may_be_quantized: bool = False,
) -> Request:
    """Return the arguments of a public call as a Request, for `check_request`.

    Args:
        may_be_sharded, may_be_quantized: whether the call accepts a VocabShard, or a QuantizedHead,
            as a weight.

    Raises:
        InvalidArgument: the weight of a VocabShard has changed; seed or offset exceeds 64 bits.
    """
    shard = scale = None
    rows: Any = weight
    if type(weight) is Tensor:  # the most frequent case
        pass
    elif may_be_sharded and isinstance(weight, VocabShard):
        weight.check_source()
        shard, rows = weight, weight.weight
    elif may_be_quantized and isinstance(weight, QuantizedHead):
        scale, rows = weight.scale, weight.weight
    if type(seed) is not Tensor or seed.dtype is not torch.int64:
        seed = as_counter("seed", seed, hidden)
    if offset is not None and (type(offset) is not Tensor or offset.dtype is not torch.int64):
        offset = as_counter("offset", offset, hidden)
    return Request(
        hidden,
        rows,
        seed=seed,
        offset=offset,
        temperature=temperature,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        vocab_size=vocab_size,  # type: ignore[arg-type]  # None until it is checked
        num_samples=num_samples,
        noise=noise,
        shard=shard,
        scale=scale,
    )


def check_request(request: Request) -> Request:
    """Check all arguments of a request and return it with defaults filled in.

    `flash_sample` documents the arguments. No values of tensors are read.

    Raises:
        InvalidType, InvalidArgument: an argument has the wrong type, dtype, shape, device, layout
            or range.
    """
    shard, scale, vocab_size = request.shard, request.scale, request.vocab_size
    dtypes = () if scale is None else tuple(LARGEST_NUMBERS)
    hidden, weight = check_matrices(request.hidden, request.weight, dtypes)
    B, device = hidden.shape[0], hidden.device
    V = weight.shape[0] if shard is None else shard.vocab_size
    if vocab_size is not None:
        if shard is not None:
            raise InvalidArgument("vocab_size: expected None with a VocabShard, which has one")
        V = check_integer("vocab_size", vocab_size, 1, V)
    temperature = check_temperature(request.temperature, B, device)
    if request.bias is not None:
        check_bias(request.bias, B, V, device)
    if request.mask is not None:
        check_mask(request.mask, B, V, device)
    check_counter("seed", request.seed, B, device)
    if request.offset is not None:
        check_counter("offset", request.offset, B, device)
    samples = check_integer("num_samples", request.num_samples, 1, MAX_SAMPLES)
    soft_cap = request.soft_cap
    if soft_cap is not None:
        soft_cap = check_number("soft_cap", soft_cap, positive=True)
    at_once = min(samples, SAMPLES_AT_ONCE)
    if shard is not None and B * at_once > shard.slots:
        raise InvalidArgument(
            f"hidden: expected at most {shard.slots} rows times samples (up to {SAMPLES_AT_ONCE} "
            f"at a time), the slots of the VocabShard; got {B} times {at_once}"
        )
    return request._replace(
        temperature=temperature, soft_cap=soft_cap, vocab_size=V, noise=check_noise(request.noise)
    )


def checked_request(
    hidden: Tensor, weight: Tensor | VocabShard | QuantizedHead, **arguments: Any
) -> Request:
    """Return check_request(unchecked_request(...)); `arguments` are those of the latter."""
    return check_request(unchecked_request(hidden, weight, **arguments))


@torch.no_grad()
def raw_logits(request: Request) -> Tensor:
    """Return hidden @ weight.T times the scales, fp32 [B, V].

    A token whose scale is negative or not finite gets NaN. A token of another rank gets 0.
    """
    shard = request.shard
    hidden = request.hidden.float()
    if shard is None:
        logits = hidden.new_empty(hidden.shape[0], request.vocab_size)
        _multiply(hidden, request.weight[: request.vocab_size], logits)
        if request.scale is None:
            return logits
        scale = request.scale.where((request.scale >= 0) & request.scale.isfinite(), torch.nan)
        return logits * scale[: request.vocab_size] if scale.ndim else logits * scale
    logits = hidden.new_zeros(hidden.shape[0], request.vocab_size)
    columns = slice(shard.first_token, shard.first_token + shard.num_tokens)
    _multiply(hidden, request.weight[: shard.num_tokens], logits[:, columns])
    return logits


def _multiply(hidden: Tensor, weight: Tensor, out: Tensor) -> None:
    """Store hidden @ weight.T, computed in fp32, into `out`, [B, weight.shape[0]].

    A weight in another dtype is converted a few rows at a time into a buffer that stays in the
    cache. Converting all of it at once takes a CPU ten times as long as the product.
    """
    if weight.dtype == torch.float32:
        torch.mm(hidden, weight.T, out=out)
        return
    rows = max(1, _CONVERTED_NUMBERS // weight.shape[1])
    buffer = hidden.new_empty(min(rows, weight.shape[0]), weight.shape[1])
    for part, columns in zip(weight.split(rows), out.split(rows, dim=1), strict=True):
        torch.mm(hidden, buffer[: len(part)].copy_(part).T, out=columns)
