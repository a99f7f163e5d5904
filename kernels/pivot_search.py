"""Truncated sampling over stored logits by a guessed pivot, in the class of Qrita; one launch.

Qrita (arXiv 2602.01518, vLLM's sampler for top-k and top-p) does not sort. It estimates the kth
largest logit from the mean and the standard deviation of a row, gathers the logits above a slightly
smaller pivot, and searches for the cutoff among these few; if they are fewer than k, it gathers all
logits. This is an independent implementation: the pivot is the quantile of the normal distribution
less 15 %, the cutoff is exact (truncated.cutoff), and the noise is that of the contract. One
program per row gathers up to 4096 tokens; if more must be searched, it reads the row for each step.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from fsbench.kernels.device.rows import of_row
from fsbench.kernels.noise.arithmetic import LOG2_E, log, nan_max
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.keys import LOWEST, LOWEST_KEY, ordered
from fsbench.kernels.providing.filters import STORED_LOGITS, draw_of_stored, draw_rows
from fsbench.kernels.providing.launches import noise_map
from fsbench.kernels.truncated.cutoff import GATHERED, first_key
from fsbench.kernels.truncated.race import append, draw_of_gathered
from fsbench.provider import Kind, Provider, Tensor

TOKENS_AT_ONCE = 4096
NUM_WARPS = 16


@triton.jit
def _statistics(logits_ptr, V, BLOCK: tl.constexpr):
    """Return the largest logit, or NaN; mean and standard deviation of the finite logits."""
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    number = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        largest = nan_max(largest, y)
        finite = y > float("-inf")
        number += finite.to(tl.float32)
        total += tl.where(finite, y, 0.0)
        squares += tl.where(finite, y * y, 0.0)
    n = tl.maximum(tl.sum(number), 1.0)
    mean = tl.sum(total) / n
    variance = tl.maximum(tl.sum(squares) / n - mean * mean, 0.0)
    return tl.reduce(largest, 0, nan_max), mean, tl.sqrt(variance)


@triton.jit
def _upper_quantile(share):
    """Return z of the normal distribution with this share above it, at most 1/2.

    Abramowitz and Stegun, 26.2.22; the error is at most 0.003.
    """
    t = tl.sqrt(-2.0 * log(share))
    return t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t)


@triton.jit
def _gather(logits_ptr, low, keys_ptr, V, BLOCK: tl.constexpr):
    """Store the keys of a row that are at least `low` at keys_ptr; count them (`append`)."""
    n = tl.zeros((), tl.int32)
    for first in tl.range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        n = append(keys_ptr, n, y, token, low)
    tl.debug_barrier()
    return n


@triton.jit(do_not_specialize=["top_k", "V"])
def _pivot_search_kernel(
    logits_ptr,  # [B, V]
    keys_ptr,  # [B, GATHERED] int64, scratch
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32
    top_k,  # int32, or pointer to [B] int32
    top_p,  # fp32, or pointer to [B] fp32
    min_p,  # as top_p
    tokens_ptr,  # [B] int64, out
    stride,  # of the rows of logits
    V,
    PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    keys_ptr += row.to(tl.int64) * GATHERED
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)
    T, inverse_temperature = temperatures(tl.full((), temperature, tl.float32))
    k = of_row(top_k, row, tl.int32, PER_ROW)
    p = of_row(top_p, row, tl.float32, PER_ROW)
    least = of_row(min_p, row, tl.float32, PER_ROW)
    k = tl.where(T > 0.0, tl.where(k > 0, tl.minimum(k, V), V), 1)

    top, mean, deviation = _statistics(logits_ptr, V, BLOCK)
    valid = (top < float("inf")) & (top > float("-inf"))
    top = tl.where(valid, top, 0.0)
    floor = tl.full((), LOWEST, tl.int32)
    if (least > 0.0) & (T > 0.0):
        threshold = top + T * log(tl.minimum(tl.maximum(least, 1e-37), 1.0))
        floor = tl.maximum(floor, ordered(threshold))
    pivot = floor
    share = k.to(tl.float32) / V
    if valid & (share < 0.5):
        z = _upper_quantile(share)
        guess = mean + deviation * (z - 0.15 * tl.abs(z))
        pivot = tl.maximum(pivot, ordered(tl.minimum(guess, top)))
    n = _gather(logits_ptr, pivot, keys_ptr, V, BLOCK)
    if (n < k) & (pivot > floor):
        pivot = floor
        n = _gather(logits_ptr, pivot, keys_ptr, V, BLOCK)
    drawn = tl.full((), LOWEST_KEY, tl.int64)
    token, _cut = draw_of_gathered(
        logits_ptr, keys_ptr, n, first_key(pivot), drawn, k, p, (p < 1.0) & (T > 0.0),
        first_key(floor), valid, top, inverse_temperature * LOG2_E, T, seed, offset, row, V,
    )  # fmt: skip
    tl.store(tokens_ptr + row, token.to(tl.int64))


def pivot_search(
    logits: Tensor, seed: Tensor, offset: Tensor, temperature: float, **filters: Any
) -> Tensor:
    """Draw a token from each row of stored logits; see draw_rows."""
    import torch

    return draw_rows(
        _pivot_search_kernel, logits, seed, offset, temperature, [(GATHERED.value, torch.int64)],
        **filters, BLOCK=TOKENS_AT_ONCE, num_warps=NUM_WARPS,
    )  # fmt: skip


PROVIDER = Provider(
    name="pivot_search",
    label="cuBLAS + pivot search",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    capabilities=STORED_LOGITS,
    noise_map=noise_map,
    build=draw_of_stored(pivot_search),
    presets=("truncated",),
)
