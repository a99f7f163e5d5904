"""torch.ops.fsbench.flash_sample: what flash_sample launches, as an operator that torch knows.

As an operator it is one opaque node to torch.compile and to fake tensors; its arguments have been
checked by flash_sample, and its results are written to tensors of the caller's. An operator takes
tensors and numbers only, so a request is taken apart for it, here, and put together again. Calls
that neither of the two sees go past it: torch's way to an operator written in Python costs a step's
thread more time than the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, Optional

import torch
from torch import Tensor

from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Sample
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.fused.draw import draw
from fsbench.kernels.shard.vocab_shard import by_key

MUTATED = ("tokens", "valid", "logprob", "logz", "entropy", "rank", "top_tokens", "top_logprob")


def _carry_out(
    hidden: Tensor,
    weight: Tensor,
    seed: Tensor,
    offset: Optional[Tensor],  # noqa: UP045 (torch reads the schema from these)
    temperature: float,
    temperatures: Optional[Tensor],  # noqa: UP045
    soft_cap: Optional[float],  # noqa: UP045
    bias: Optional[Tensor],  # noqa: UP045
    mask: Optional[Tensor],  # noqa: UP045
    vocab_size: int,
    num_samples: int,
    noise: str,
    kernel: str,
    tiles: Optional[Sequence[int]],  # noqa: UP045
    tokens: Tensor,
    valid: Tensor,
    logprob: Optional[Tensor],  # noqa: UP045
    logz: Optional[Tensor],  # noqa: UP045
    entropy: Optional[Tensor],  # noqa: UP045
    rank: Optional[Tensor],  # noqa: UP045
    top_tokens: Optional[Tensor],  # noqa: UP045
    top_logprob: Optional[Tensor],  # noqa: UP045
    shard: Optional[str],  # noqa: UP045
    scale: Optional[Tensor],  # noqa: UP045
) -> None:
    """See flash_sample. temperatures, if given, is used in place of temperature.

    tiles: the fields of the config of `kernel`, which is not "auto" then. shard: key of the
    VocabShard that weight is of.
    """
    request = Request(
        hidden=hidden,
        weight=weight,
        seed=seed,
        offset=offset,
        temperature=temperature if temperatures is None else temperatures,
        soft_cap=soft_cap,
        bias=bias,
        mask=mask,
        vocab_size=vocab_size,
        num_samples=num_samples,
        noise=noise,
        shard=None if shard is None else by_key(shard),
        scale=scale,
    )
    out = Sample(tokens, valid, logprob, logz, entropy, rank, top_tokens, top_logprob)
    draw(request, kernel, _config(kernel, tiles), out)


def through_operator(
    request: Request, kernel: str, config: TileConfig | HopperConfig | None, out: Sample
) -> None:
    """Draw as `draw` does, by the operator."""
    given, shard = request.temperature, request.shard
    by_tensor = isinstance(given, Tensor)
    flash_sample_op(
        request.hidden,
        request.weight,
        request.seed,
        request.offset,
        1.0 if by_tensor else given,
        given if by_tensor else None,
        request.soft_cap,
        request.bias,
        request.mask,
        request.vocab_size,
        request.num_samples,
        request.noise,
        kernel,
        [int(value) for value in astuple(config)] if config is not None else None,
        *out,
        None if shard is None else shard.key,
        request.scale,
    )


flash_sample_op = torch.library.custom_op("fsbench::flash_sample", mutates_args=MUTATED)(_carry_out)


def _config(kernel: str, tiles: Sequence[Any] | None) -> TileConfig | HopperConfig | None:
    if tiles is None:
        return None
    return HopperConfig(*tiles) if kernel == "hopper" else TileConfig(*tiles)


@flash_sample_op.register_fake
def _(*arguments: object) -> None:
    """Shapes need no inference: the results are the caller's tensors."""
