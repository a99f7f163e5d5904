"""Gumbel-max over stored logits, one pass, one launch: the strongest sampler that is not fused.

Algorithm I.1 of the FlashSampling paper, parallel over chunks of the vocabulary: cuBLAS writes the
logits, this kernel reads them once, adds the same token noise as the fused kernel and keeps the
best candidate; the last program of a row decodes its token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from fsbench.kernels._device import launching_on
from fsbench.kernels._helper import (
    LOWEST_KEY,
    best_keys,
    gumbel_bound,
    nan_max,
    random_words,
    score_of_key,
    split_words,
    token_of_key,
)
from fsbench.kernels._workspace import held_bytes, workspace
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 1024
NUM_WARPS = 4
_PROGRAMS = 132 * 4
"""Programs to aim for. Of 45 settings tried on an H200 this one was within 4 % of the best at every
B: 5.6, 14, 33 and 85 us for [B, 151936] bf16 logits at B = 1, 16, 64, 256. Reading them takes 18 us
at B = 256; the rest is the noise."""


@triton.jit
def _highest(logits, v0, row, seed, offset, temperature):
    """No score of the block is above this; NaN if a logit is. A third of the cost of the scores.

    It decides whether a block can change the result. In a row's order of blocks the n-th does with
    probability 1/n, so almost all noise is drawn but never put through its two logarithms.
    """
    y0, y1, y2, y3 = split_words(logits)
    zero = (y0 < float("-inf")).to(tl.int32)  # as in best_keys
    r0, r1, r2, r3 = random_words(
        v0, tl.arange(0, logits.shape[1] // 4), row, seed, offset, 0, zero
    )
    s01 = nan_max(y0 + temperature * gumbel_bound(r0), y1 + temperature * gumbel_bound(r1))
    s23 = nan_max(y2 + temperature * gumbel_bound(r2), y3 + temperature * gumbel_bound(r3))
    return tl.reduce(tl.reduce(nan_max(s01, s23), 1, nan_max), 0, nan_max)


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
    best_score = float("nan")  # nothing is below it: the first block is always looked at
    for v0 in tl.range(split * BLOCK, V, splits * BLOCK):
        offs_v = v0 + tl.arange(0, BLOCK)
        stored = tl.load(logits_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
        logits = stored.to(tl.float32)[None, :]
        if not (_highest(logits, v0, rows, seed, offset, temperature) < best_score):
            best = best_keys(logits, v0, rows, seed, offset, temperature, best)
            best_score = score_of_key(tl.max(best))

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
        one fsbench.reference.expect gives for these logits.
    """
    import torch

    B, V = logits.shape
    work = workspace(B, logits.device)
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    splits = max(1, min(triton.cdiv(_PROGRAMS, B), triton.cdiv(V, BLOCK)))
    with launching_on(logits.device):
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
    return _GumbelArgmax(problem, weight)


class _GumbelArgmax:
    def __init__(self, problem: Problem, weight: Tensor):
        self._weight = weight
        self._temperature = problem.temperature

    @property
    def shared_bytes(self) -> int:
        """Memory that outlives a launch and serves all of them: the workspaces."""
        return held_bytes(self._weight.device)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return gumbel_argmax(hidden @ self._weight.T, seed, offset, self._temperature)


PROVIDER = Provider(
    name="gumbel_argmax",
    label="cuBLAS + one-pass Gumbel argmax",
    kind=Kind.EXACT,
    requires=("triton",),
    capabilities=Capabilities(noise="token", zero_temperature=True),
    build=build,
    presets=("quick", "lean"),
)
