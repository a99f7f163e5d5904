"""Device code of akunu's sampler over stored logits: one program per row.

From the chapter on sampling of the book about akunu (Apple Metal; its kernel `gumbel_topk_f16`,
1024 threads for its only row). `akunu_faithful_kernel` has the arithmetic of the text:

    0 max   1 threshold of top-k: 12 bisections of [max - 30, max] by count
    2 threshold of top-p: 8 bisections of [threshold, max] by mass, keeping at most p
    3 threshold of min-p
    4 logit + T Gumbel(pcg hash), stored as fp16; an argmax follows as another launch

The filters act at T = 1. `akunu_exact_kernel` does the same job, in the same order and with one
program per row, without the approximations: exactly k are kept, and the token that crosses p, ties
go to the lower token, and the scores stay in fp32, with noise of the contract
(docs/design/noise.md). It reads the row once, not about twenty times, and finds the maxima of 4096
parts of it:

    0 the kth largest of these is a lower bound of the threshold; about k parts reach it
    1 of these parts alone it gathers the tokens that reach it
    2 each of these is compared with all: its rank is for top-k, the mass above it for top-p

That is with top-k; without it, or with more tokens at the threshold than there is room for, it
reads the row for every step of a search. docs/results/filters.md has what the approximations cost.

The text begins with a repetition penalty, which neither kernel has.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.rows import of_row
from fsbench.kernels.device.thresholds import reached_by
from fsbench.kernels.noise.arithmetic import LOG2_E, halves, log, nan_max
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.keys import LOWEST, LOWEST_KEY, ordered
from fsbench.kernels.truncated.cutoff import GATHERED, first_key
from fsbench.kernels.truncated.race import append, draw_of_gathered

SPAN = tl.constexpr(30.0)
"""Logits this far below the largest are never kept."""

ROW_PARTS = tl.constexpr(4096)
"""Parts of a row in the exact mode. A turn is the next ROW_PARTS * WIDE tokens of a row; a part has
WIDE neighbors of them, the 16 bytes that a thread reads at once."""


@triton.jit
def pcg(state):
    """The chapter's hash of a uint32 (PCG-RXS-M-XS), a bijection."""
    state = state * 747796405 + 2891336453
    word = ((state >> ((state >> 28) + 4)) ^ state) * 277803737
    return (word >> 22) ^ word


@triton.jit
def _half(logits_ptr, first, V, BLOCK: tl.constexpr):
    """Return logits of tokens first .. first + BLOCK - 1, rounded to fp16, in fp32; the tokens."""
    token = first + tl.arange(0, BLOCK)
    y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
    return y.to(tl.float16).to(tl.float32), token


@triton.jit
def _above(logits_ptr, limit, V, BLOCK: tl.constexpr):
    """Count the logits above the limit."""
    count = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, V, BLOCK):
        y, _ = _half(logits_ptr, first, V, BLOCK)
        count += (y > limit).to(tl.int32)
    return tl.sum(count)


@triton.jit
def _mass_from(logits_ptr, limit, top, V, BLOCK: tl.constexpr):
    """Return the sum of exp(y - top) over the logits that are at least the limit."""
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, V, BLOCK):
        y, _ = _half(logits_ptr, first, V, BLOCK)
        mass += tl.where(y >= limit, tl.exp2((y - top) * LOG2_E), 0.0)
    return tl.sum(mass)


@triton.jit(do_not_specialize=["top_k", "V"])
def akunu_faithful_kernel(
    logits_ptr,  # [B, V], fp16 or read as such
    scores_ptr,  # [B, V] fp16, out
    seed_ptr,  # [1] int64: the chapter's seed_offset
    offset_ptr,  # [1] int64: its position
    temperature,  # fp32
    top_k,  # 0 is off
    top_p,  # off outside (0, 1)
    min_p,  # off outside (0, 1)
    stride,  # of the rows of logits
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    scores_ptr += row.to(tl.int64) * V
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in tl.range(0, V, BLOCK):
        y, _ = _half(logits_ptr, first, V, BLOCK)
        largest = tl.maximum(largest, y)
    top = tl.max(largest)

    threshold = tl.full((), float("-inf"), tl.float32)
    if top_k > 0:
        low = top - SPAN
        high = top
        for _ in range(12):
            middle = (low + high) * 0.5
            above_limit = _above(logits_ptr, middle, V, BLOCK) > top_k
            low = tl.where(above_limit, middle, low)
            high = tl.where(above_limit, high, middle)
        threshold = high
    if (top_p > 0.0) & (top_p < 1.0):
        # The text has top-k always on; without it the bisection needs a lower end.
        low = tl.maximum(threshold, top - SPAN)
        high = top
        target = top_p * _mass_from(logits_ptr, threshold, top, V, BLOCK)
        for _ in range(8):
            middle = (low + high) * 0.5
            above_limit = _mass_from(logits_ptr, middle, top, V, BLOCK) > target
            low = tl.where(above_limit, middle, low)
            high = tl.where(above_limit, high, middle)
        threshold = tl.maximum(threshold, high)
    if (min_p > 0.0) & (min_p < 1.0):
        threshold = tl.maximum(threshold, top + log(min_p + tl.zeros((), tl.float32)))

    # The text has one row; here each row has a seed_offset.
    state = (tl.load(offset_ptr) + tl.load(seed_ptr) + row.to(tl.int64) * 0x9E3779B9).to(tl.uint32)
    state = state * 2654435761
    for first in tl.range(0, V, BLOCK):
        y, token = _half(logits_ptr, first, V, BLOCK)
        u = pcg(state + token.to(tl.uint32)).to(tl.float32) / 4294967296.0
        u = tl.minimum(tl.maximum(u, 1e-7), 1.0 - 1e-7)
        g = -tl.log(-tl.log(u))
        score = tl.where(y < threshold, float("-inf"), y + temperature * g)
        tl.store(scores_ptr + token, score.to(tl.float16), mask=token < V)


@triton.jit
def _part_tokens(part, turn, WIDE: tl.constexpr):
    """Return the tokens [N, WIDE] of parts [N] of a row in a turn, int32."""
    return (part * WIDE + turn * (ROW_PARTS * WIDE))[:, None] + tl.arange(0, WIDE)[None, :]


@triton.jit
def _largest_of_lines(y):
    """Return the largest of each line of [N, W], or NaN if it has one: [N]."""
    # Like tl.reduce, but the interpreter would make a call for every element of that.
    if y.shape[1] > 1:
        even, odd = halves(y)
        return _largest_of_lines(nan_max(even, odd))
    else:
        return y.reshape(y.shape[0])


@triton.jit
def _part_maxima(logits_ptr, V, WIDE: tl.constexpr):
    """Return the largest logit of each part of a row, fp32 [ROW_PARTS].

    +inf replaces NaN, since a row with +inf is invalid, too; an empty part has -inf.
    """
    largest = tl.full((ROW_PARTS,), float("-inf"), tl.float32)
    for turn in tl.range(0, tl.cdiv(V, ROW_PARTS * WIDE)):
        token = _part_tokens(tl.arange(0, ROW_PARTS), turn, WIDE)
        y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        new = _largest_of_lines(y)
        largest = tl.maximum(largest, tl.where(new == new, new, float("inf")))
    return largest


@triton.jit
def _gather_parts(logits_ptr, among, low, keys_ptr, parts_ptr, V, WIDE: tl.constexpr,
                  TURNS: tl.constexpr):  # fmt: skip
    """Store the keys that are at least `low`, of the parts in `among`, at keys_ptr; count them.

    The count is at least GATHERED + 1 if there are more than GATHERED keys.
    """
    AT_ONCE: tl.constexpr = GATHERED // (TURNS * WIDE)
    tl.static_assert(AT_ONCE > 0, "a row of more tokens than ROW_PARTS * GATHERED")
    place = tl.cumsum(among.to(tl.int32), axis=0) - 1
    tl.store(parts_ptr + place, tl.arange(0, ROW_PARTS), mask=among)
    parts = tl.sum(among.to(tl.int32))
    tl.debug_barrier()
    n = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while (first < parts) & (n <= GATHERED):
        slot = first * TURNS + tl.arange(0, AT_ONCE * TURNS)
        index = slot // TURNS
        part = tl.load(parts_ptr + index, mask=index < parts, other=0)
        token = _part_tokens(part, slot % TURNS, WIDE)
        in_bounds = (index < parts)[:, None] & (token < V)
        y = tl.load(logits_ptr + token, mask=in_bounds, other=float("-inf")).to(tl.float32)
        n = append(keys_ptr, n, y.reshape(GATHERED), token.reshape(GATHERED), low)
        first += AT_ONCE
    tl.debug_barrier()
    return n


@triton.jit(do_not_specialize=["top_k"])
def akunu_exact_kernel(
    logits_ptr,  # [B, V]
    keys_ptr,  # [B, GATHERED] int64, scratch
    parts_ptr,  # [B, ROW_PARTS] int32, scratch
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32
    top_k,  # int32, or pointer to [B] int32
    top_p,  # fp32, or pointer to [B] fp32
    min_p,  # as top_p
    tokens_ptr,  # [B] int64, out
    stride,  # of the rows of logits; specialized: aligned ones are read 16 bytes at a time
    V,  # specialized, too
    PER_ROW: tl.constexpr,
    WIDE: tl.constexpr,  # logits in 16 bytes
    TURNS: tl.constexpr,  # a power of two, at least V / (ROW_PARTS * WIDE)
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * stride
    keys_ptr += row.to(tl.int64) * GATHERED
    parts_ptr += row.to(tl.int64) * ROW_PARTS
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)
    T, _inverse = temperatures(tl.full((), temperature, tl.float32))
    k = of_row(top_k, row, tl.int32, PER_ROW)
    p = of_row(top_p, row, tl.float32, PER_ROW)
    least = of_row(min_p, row, tl.float32, PER_ROW)
    k = tl.where(T > 0.0, tl.where(k > 0, tl.minimum(k, V), V), 1)
    by_p = (p < 1.0) & (T > 0.0)

    largest = _part_maxima(logits_ptr, V, WIDE)
    top = tl.max(largest)
    valid = (top < float("inf")) & (top > float("-inf"))
    top = tl.where(valid, top, 0.0)
    order = tl.where(valid, ordered(largest), LOWEST - 1)
    low = tl.full((), LOWEST, tl.int32)
    if valid & (k < ROW_PARTS):
        # No two of these are the same logit.
        low = reached_by(order, k, low, ordered(top) + 1)
    floor = tl.full((), LOWEST, tl.int32)
    if (least > 0.0) & (T > 0.0):
        floor = ordered(top + log(tl.minimum(tl.maximum(least, 1e-37), 1.0)))
        if not by_p:  # the mass of top-p includes tokens that min-p cuts off
            low = tl.maximum(low, floor)
    n = _gather_parts(logits_ptr, order >= low, low, keys_ptr, parts_ptr, V, WIDE, TURNS)
    drawn = tl.full((), LOWEST_KEY, tl.int64)
    sharpness = tl.full((), LOG2_E, tl.float32)
    token, _cut = draw_of_gathered(
        logits_ptr, keys_ptr, n, first_key(low), drawn, k, p, by_p, first_key(floor), valid, top,
        sharpness, T, seed, offset, row, V,
    )  # fmt: skip
    tl.store(tokens_ptr + row, token.to(tl.int64))
