"""Device code of kernels that write their logits to memory: the store, and what goes with it."""

import triton
import triton.language as tl

from fsbench.kernels._epilogue import processed
from fsbench.kernels._helper import halves, nan_max

RUN = tl.constexpr(32)
"""Tokens in a row, from a multiple of it on, whose largest logit is kept beside the logits."""

SUBTILE = tl.constexpr(32)
"""Columns that are processed at once; of at least 32, since a mask comes by words of 32."""


@triton.jit
def store_logits(logits_ptr, logits, rows, v0, B, V):
    """Store a tile, 32 columns at a time: the shared memory that a store needs is as wide."""
    WIDTH: tl.constexpr = logits.shape[1]
    if WIDTH > 32:
        low, high = halves(logits)
        store_logits(logits_ptr, low, rows, v0, B, V)
        store_logits(logits_ptr, high, rows, v0 + WIDTH // 2, B, V)
    else:
        offs_v = v0 + tl.arange(0, WIDTH)
        at = logits_ptr + rows.to(tl.int64)[:, None] * V + offs_v[None, :]
        tl.store(at, logits, mask=(rows < B)[:, None] & (offs_v < V)[None, :])


@triton.jit
def store_with_largest(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words, logits_ptr,
                       largest_ptr, runs):  # fmt: skip
    """Make a tile [R, WIDTH] the logits that are sampled, store them, and the largest of each run.

    SUBTILE columns at a time: more would need too many registers. WIDTH is a multiple of it.

    Args:
        logits: matmul results, fp32; what is done to them, and the arguments: `processed`.
        logits_ptr: [B, V] fp32, out. largest_ptr: [B, runs] fp32, out; NaN if the run has one.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    if WIDTH > SUBTILE:
        low, high = halves(logits)
        words_low = None
        words_high = None
        if words is not None:
            words_low, words_high = halves(words)
        bias_low = None
        bias_high = None
        if bias is not None:
            bias_low, bias_high = bias.reshape(2, WIDTH // 2).permute(1, 0).split()
        store_with_largest(low, rows, v0, B, V, soft_cap, bias_low, row_bias_ptr, words_low,
                           logits_ptr, largest_ptr, runs)  # fmt: skip
        store_with_largest(high, rows, v0 + WIDTH // 2, B, V, soft_cap, bias_high, row_bias_ptr,
                           words_high, logits_ptr, largest_ptr, runs)  # fmt: skip
    else:
        y = processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words)
        store_logits(logits_ptr, y, rows, v0, B, V)
        largest = tl.reduce(y.reshape(R, WIDTH // RUN, RUN), 2, nan_max)
        run = v0 // RUN + tl.arange(0, WIDTH // RUN)
        at = largest_ptr + rows.to(tl.int64)[:, None] * runs + run[None, :]
        tl.store(at, largest, mask=(rows < B)[:, None] & (run < runs)[None, :])
