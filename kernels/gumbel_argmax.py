"""Gumbel-max over stored logits, one pass, one launch: the strongest sampler that is not fused.

Algorithm I.1 of the FlashSampling paper, parallel over chunks of the vocabulary: cuBLAS writes the
logits, this kernel reads them once, adds the same token noise as the fused kernel and keeps the
best candidate; the last program of a row decodes its token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from fsbench.kernels._helper import LOWEST_KEY, best_keys, token_of_key
from fsbench.kernels._workspace import workspace
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 2048
NUM_WARPS = 4
_PROGRAMS = 132 * 8
"""Programs to aim for: enough loads in flight to fill the memory system of a large GPU."""


@triton.jit(do_not_specialize=["splits"])
def _gumbel_argmax_kernel(
    logits_ptr,  # [B, V]
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32
    keys_ptr,  # [>= B] int64, LOWEST_KEY between calls
    arrivals_ptr,  # [>= B] int32, 0 between calls
    tokens_ptr,  # [B] int64, out
    V,
    splits,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)
    rows = row + tl.zeros((1, 1), tl.int32)
    logits_ptr += row.to(tl.int64) * V

    best = tl.full((1, BLOCK // 4), LOWEST_KEY, tl.int64)
    for v0 in tl.range(split * BLOCK, V, splits * BLOCK):
        offs_v = v0 + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
        best = best_keys(logits.to(tl.float32)[None, :], v0, rows, seed, offset, temperature, best)

    tl.atomic_max(keys_ptr + row, tl.max(best))
    if tl.atomic_add(arrivals_ptr + row, 1) == splits - 1:
        token = token_of_key(tl.atomic_xchg(keys_ptr + row, LOWEST_KEY))
        tl.store(tokens_ptr + row, token.to(tl.int64))
        tl.atomic_xchg(arrivals_ptr + row, 0)


def gumbel_argmax(logits: Tensor, seed: Tensor, offset: Tensor, temperature: float) -> Tensor:
    """Draw one token per row of stored logits.

    Args:
        logits: [B, V] contiguous, bf16, fp16 or fp32.
        seed, offset: int64 [1] on the same device.
        temperature: >= 0; 0 is greedy.

    Returns:
        int64 [B]; -1 for a row with a NaN or +inf logit or without a finite one. The token is the
        one fsbench.reference.sample_token_noise gives for these logits.
    """
    import torch

    B, V = logits.shape
    work = workspace(B, logits.device)
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    splits = max(1, min(triton.cdiv(_PROGRAMS, B), triton.cdiv(V, BLOCK)))
    _gumbel_argmax_kernel[(B * splits,)](
        logits,
        seed,
        offset,
        float(temperature),
        work.keys,
        work.arrivals,
        tokens,
        V,
        splits,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return tokens


def build(problem: Problem, weight: Tensor) -> Launch:
    """See Provider."""

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return gumbel_argmax(hidden @ weight.T, seed, offset, problem.temperature)

    return launch


PROVIDER = Provider(
    name="gumbel_argmax",
    label="cuBLAS + one-pass Gumbel argmax",
    kind=Kind.EXACT,
    requires=("triton",),
    capabilities=Capabilities(noise="token", zero_temperature=True),
    build=build,
    presets=("quick", "lean"),
)
