"""torch.ops.fsbench.flash_sample: what flash_sample launches, as an operator that torch knows.

As an operator it is one opaque node to torch.compile and to fake tensors; its arguments have been
checked by flash_sample, and its results are written to tensors of the caller's. Calls that neither
of the two sees go past it: torch's way to an operator written in Python costs a step's thread more
time than the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels._arguments import Request
from fsbench.kernels._choice import choose
from fsbench.kernels._flash_sample import Sample
from fsbench.kernels._flash_sampling_config import TileConfig
from fsbench.kernels._hopper_config import HopperConfig
from fsbench.kernels._packed import pack
from fsbench.kernels._vocab_shard import VocabShard, by_key, reachable

MUTATED = ("tokens", "valid", "logprob", "logz")


def carry_out(
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
    shard: Optional[str] = None,  # noqa: UP045
) -> None:
    """See flash_sample. temperatures, if given, is used in place of temperature.

    tiles: the fields of the config of `kernel`, which is not "auto" then. shard: key of the
    VocabShard that weight is of.
    """
    choice = choose(hidden, weight, noise, kernel, _config(kernel, tiles))
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
    )
    draw(request, choice, Sample(tokens, valid, logprob, logz))


flash_sample_op = torch.library.custom_op("fsbench::flash_sample", mutates_args=MUTATED)(carry_out)


def draw(request: Request, choice: TileConfig | HopperConfig, out: Sample) -> None:
    """Carry out a request by a kernel, or where none can run by the reference."""
    if request.hidden.device.type == "cuda" or interpretable(request):
        from fsbench.kernels._launch import launch

        launch(request, choice, out)
    else:
        _compute(request, out)


def _config(kernel: str, tiles: Sequence[int] | None) -> TileConfig | HopperConfig | None:
    if tiles is None:
        return None
    return HopperConfig(*tiles) if kernel == "hopper" else TileConfig(*tiles)


@flash_sample_op.register_fake
def _(*arguments: object) -> None:
    """Shapes need no inference: the results are the caller's tensors."""


def interpretable(request: Request) -> bool:
    """Whether Triton's interpreter can run the kernel, on CPU tensors."""
    try:
        import triton
    except ModuleNotFoundError:  # it exists for Linux only
        return False
    alone = request.merge_later or reachable(request.shard)
    return triton.knobs.runtime.interpret and request.hidden.dtype != torch.bfloat16 and alone


@torch.no_grad()
def _compute(request: Request, out: Sample) -> None:
    """The same by fsbench.reference, on logits accumulated in fp32."""
    n, temperature, shard = request.num_samples, request.temperature, request.shard
    logits = reference.processed_logits(
        _logits(request), soft_cap=request.soft_cap, bias=request.bias, mask=request.mask
    )
    if shard is not None:
        # Of the other ranks' tokens nothing is known here.
        logits[:, : shard.first_token] = -torch.inf
        logits[:, shard.first_token + shard.num_tokens :] = -torch.inf
    step = torch.zeros(1, dtype=torch.int64) if request.offset is None else request.offset
    logz = reference.log_partition(logits, temperature)
    merging = shard if not request.merge_later else None
    if merging is not None:
        logz = merging.gather(logz).logsumexp(0)
    for sample in range(n):
        tokens, _, scores = reference.expect(
            logits, request.seed, step, temperature, request.noise, sample=sample
        )
        value = reference.log_probability(logits, tokens.clamp_min(0), temperature)
        value += reference.log_partition(logits, temperature)
        if merging is not None:
            tokens, value = _best_of_ranks(merging, tokens, scores, value)
        drawn = pack(scores, tokens) if request.merge_later else tokens
        out.tokens.view(-1, n)[:, sample] = drawn
        out.valid.copy_(tokens >= 0)
        if out.logprob is not None:
            out.logprob.view(-1, n)[:, sample] = torch.where(out.valid, value - logz, torch.nan)
    if out.logz is not None:
        out.logz.copy_(torch.where(out.valid, logz, torch.nan))


def _logits(request: Request) -> Tensor:
    """hidden @ weight.T in fp32, [B, V]; of a shard, in its place among zeros."""
    shard = request.shard
    if shard is None:
        return request.hidden.float() @ request.weight[: request.vocab_size].float().T
    logits = torch.zeros(request.hidden.shape[0], request.vocab_size)
    mine = slice(shard.first_token, shard.first_token + shard.num_tokens)
    logits[:, mine] = request.hidden.float() @ request.weight[: shard.num_tokens].float().T
    return logits


def _best_of_ranks(
    shard: VocabShard, tokens: Tensor, scores: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """The token of the best score over all ranks, the lowest of equal ones, and its value."""
    all_scores = shard.gather(scores)
    best = all_scores.argmax(0, keepdim=True)  # the first: lower ranks have lower tokens
    tokens = shard.gather(tokens).gather(0, best)[0]
    tokens = torch.where(all_scores.amax(0).isfinite(), tokens, -1)
    return tokens, shard.gather(value).gather(0, best)[0]
