"""Device code of truncated sampling: the matmul that stores logits, and the draw from what is kept.

`truncated_logits_kernel` stores each fp32 logit once, and beside it the largest of every run of 32
tokens. `truncated_draw_kernel`, one program per row, finds out with these maxima which runs can
hold a token that is kept, and reads no others:

    top-k   the kth largest of all maxima is at most the kth largest logit
    min-p   the threshold is known from the largest logit alone
    top-p   the largest tokens of the runs alone may have the mass p already

In the logits of these runs it looks for the cutoff by bisection over the ordered bits of an fp32:
the smallest logit that is kept, and if not all tokens with that logit are, the last token id. Where
the runs are more than fit into registers, the tokens that may be kept are gathered first, unless
they are too many, too. Then the kept tokens race with token noise (docs/noise.md). Everything is
decided on the stored numbers.
"""

import triton
import triton.language as tl

from fsbench.kernels._epilogue import allowed_words, shared_bias
from fsbench.kernels._helper import (
    LOG2_E,
    LOWEST_KEY,
    _log,
    gumbel,
    nan_max,
    ordered_key,
    split_words,
    temperatures,
    token_of_key,
)
from fsbench.kernels._mainloop import program_share, tile_logits
from fsbench.kernels._stored_logits import RUN, store_with_largest

LOWEST = tl.constexpr(-2139095040)
"""`ordered` of the lowest finite fp32."""

GATHERED = tl.constexpr(8192)
"""Tokens of a row that are gathered at most."""

PIECE = tl.constexpr(32)
"""Runs of gathered tokens that race at once."""


@triton.jit(do_not_specialize=["B", "V", "mask_words", "runs"])
def truncated_logits_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer
    weight,  # [>= V, D] descriptor (USE_TMA) or pointer
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or None
    row_bias_ptr,  # [B, V] or None
    mask_ptr,  # [B, mask_words] int32, or None
    logits_ptr,  # [B, V] fp32, out
    largest_ptr,  # [B, runs] fp32, out
    B,
    V,
    D,
    mask_words,
    runs,  # ceil(V / 32)
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    b0 = pid_b * BLOCK_B
    rows = b0 + tl.arange(0, BLOCK_B)
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        bias = None
        if bias_ptr is not None:
            bias = shared_bias(bias_ptr, v0, V, BLOCK_V)
        logits = tile_logits(
            hidden, weight, b0, v0, v0, B, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        store_with_largest(
            logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words, logits_ptr, largest_ptr,
            runs,
        )  # fmt: skip


@triton.jit
def of_row(value, row, DTYPE: tl.constexpr, PER_ROW: tl.constexpr):
    """The number of a row: value is a pointer to [B], or the number of all rows."""
    if PER_ROW:
        return tl.load(value + row).to(DTYPE)
    else:
        return tl.full((), value, DTYPE)


@triton.jit
def ordered(y):
    """fp32 -> int32 in the same order; -0 as +0. Not for NaN."""
    bits = (y + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def value_of(order):
    """The fp32 of `ordered`."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["top_k", "V", "runs", "capacity"])
def truncated_draw_kernel(
    logits_ptr,  # [B, V] fp32; penalties are written back
    largest_ptr,  # [B, runs] fp32; likewise
    found_ptr,  # [B, runs] int32, scratch
    values_ptr,  # [B, GATHERED] fp32, scratch
    ids_ptr,  # [B, GATHERED] int32, scratch
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32; so are top_p, min_p and the penalties
    top_k,  # int32, or pointer to [B] int32 or int64
    top_p,
    min_p,
    history_ptr,  # [B, capacity] int32: distinct tokens; or None
    counts_ptr,  # [B, capacity] int32: how often each occurs in the output
    lengths_ptr,  # [B] int32: how many tokens of a row's history there are
    repetition,
    presence,
    frequency,
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    kept_ptr,  # [B] int32, out: how many tokens are kept
    V,
    runs,
    capacity,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    TOP_K_PER_ROW: tl.constexpr,
    TOP_P_PER_ROW: tl.constexpr,
    MIN_P_PER_ROW: tl.constexpr,
    REPETITION_PER_ROW: tl.constexpr,
    PRESENCE_PER_ROW: tl.constexpr,
    FREQUENCY_PER_ROW: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,  # a power of two, at least runs
    CHUNK: tl.constexpr,  # runs whose logits are in registers at once
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    largest_ptr += row.to(tl.int64) * runs
    found_ptr += row.to(tl.int64) * runs
    values_ptr += row.to(tl.int64) * GATHERED
    ids_ptr += row.to(tl.int64) * GATHERED
    if history_ptr is not None:
        _penalise(
            logits_ptr, largest_ptr, history_ptr + row.to(tl.int64) * capacity,
            counts_ptr + row.to(tl.int64) * capacity, tl.load(lengths_ptr + row),
            of_row(repetition, row, tl.float32, REPETITION_PER_ROW),
            of_row(presence, row, tl.float32, PRESENCE_PER_ROW),
            of_row(frequency, row, tl.float32, FREQUENCY_PER_ROW), V,
        )  # fmt: skip

    seed = tl.load(seed_ptr + row if SEED_PER_ROW else seed_ptr)
    counted_row = row * 0 if SEED_PER_ROW else row  # see docs/noise.md
    offset = tl.zeros((), tl.int64)
    if offset_ptr is not None:
        offset = tl.load(offset_ptr + row if OFFSET_PER_ROW else offset_ptr)
    T = of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW)
    T, inverse_temperature = temperatures(T)
    k = of_row(top_k, row, tl.int32, TOP_K_PER_ROW)
    p = of_row(top_p, row, tl.float32, TOP_P_PER_ROW)
    least = of_row(min_p, row, tl.float32, MIN_P_PER_ROW)

    run = tl.arange(0, BLOCK_RUNS)
    maxima = tl.load(largest_ptr + run, mask=run < runs, other=float("-inf"))
    top = tl.reduce(maxima, 0, nan_max)
    # T, p and least are NaN or not: NaN is not equal to itself.
    valid = (top < float("inf")) & (top > float("-inf")) & (T == T) & (p == p) & (least == least)
    top = tl.where(valid, top, 0.0)
    order = tl.where(valid, ordered(maxima), LOWEST - 1)  # -inf is LOWEST - 1
    sampled = T > 0.0
    k = tl.where(sampled, tl.where(k > 0, tl.minimum(k, V), V), 1)
    by_p = sampled & (p < 1.0)
    p = tl.maximum(p, 0.0)

    # Runs below `low` hold nothing that is kept.
    above_all = ordered(top).to(tl.int64) + 1
    low = tl.full((), LOWEST, tl.int64)
    if sampled & (least > 0.0):
        threshold = top + T * _log(tl.minimum(tl.maximum(least, 1e-37), 1.0))
        low = tl.maximum(low, ordered(threshold).to(tl.int64))
    if k < runs:
        low = tl.maximum(low, _floor_of_top_k(order, k, above_all))
    total = tl.full((), 0.0, tl.float32)  # mass of what the other filters keep, once it is known
    sharpness = inverse_temperature * LOG2_E
    of_everything = by_p & (k == V) & (low == LOWEST)
    if of_everything:
        total = _mass_of_row(logits_ptr, top, sharpness, V)
        low = _floor_of_top_p(order, top, sharpness, p * total, above_all)

    among = order >= low.to(tl.int32)
    number = tl.cumsum(among.to(tl.int32), axis=0)
    n = tl.sum(among.to(tl.int32))
    tl.store(found_ptr + number - 1, run, mask=among)
    tl.debug_barrier()
    # What is searched: the runs found in the row, or what was gathered of them, as runs 0, 1, ...
    source_ptr = logits_ptr
    size = V + tl.zeros((), tl.int32)
    gathered = False
    if n > CHUNK:
        y, first = load_chunk(logits_ptr, found_ptr, 0, n, V, CHUNK)
        many = count_from(y, low, logits_ptr, found_ptr, n, V, CHUNK)
        if (many <= GATHERED) & (many > 0):
            _gather(logits_ptr, found_ptr, values_ptr, ids_ptr, low, n, V, CHUNK)
            source_ptr = values_ptr
            size = many
            n = tl.cdiv(many, RUN)
            gathered = True
            tl.store(found_ptr + run, run, mask=run < n)
            tl.debug_barrier()
    y, first = load_chunk(source_ptr, found_ptr, 0, n, size, CHUNK)

    # The cutoff: tokens of logits with `ordered` above it are kept, of those at it `quota`.
    cut = low
    quota = size
    count = count_from(y, cut, source_ptr, found_ptr, n, size, CHUNK)
    if count > k:
        cut, count, quota = cut_top_k(y, k, cut, count, above_all, source_ptr, found_ptr, n, size,
                                      CHUNK)  # fmt: skip
    if by_p & (count > 1):
        cut, count, quota = cut_top_p(y, p, total, cut, count, quota, k, above_all, top, sharpness,
                                      source_ptr, found_ptr, n, size, CHUNK)  # fmt: skip
    last = size
    if quota < size:
        last = last_token(y, first, cut, quota, source_ptr, found_ptr, n, size, CHUNK)

    if gathered:
        some = tl.full((PIECE, RUN), LOWEST_KEY, tl.int64)
        for piece in tl.range(0, tl.cdiv(n, PIECE)):
            y_piece, place = load_chunk(source_ptr, None, piece, n, size, PIECE)
            keys = race_of_places(
                y_piece, ids_ptr, place, size, cut, last, T, seed, offset, counted_row
            )
            some = tl.maximum(some, keys)
        winner = tl.max(tl.max(some, axis=1), axis=0)
    else:
        best = race(y, first, cut, last, T, seed, offset, counted_row)
        for chunk in tl.range(1, tl.cdiv(n, CHUNK)):
            y, first = load_chunk(source_ptr, found_ptr, chunk, n, size, CHUNK)
            best = tl.maximum(best, race(y, first, cut, last, T, seed, offset, counted_row))
        winner = tl.max(tl.max(best, axis=1), axis=0)
    token = tl.where(valid, token_of_key(winner), -1)
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(valid_ptr + row, token >= 0)
    tl.store(kept_ptr + row, tl.where(token >= 0, tl.minimum(count, k), 0))


@triton.jit
def load_chunk(logits_ptr, found_ptr, chunk, n, V, CHUNK: tl.constexpr):
    """(logits fp32 [CHUNK, 32] of a chunk of the runs found, first token of each run [CHUNK, 1]).

    found_ptr: the numbers of the n runs, or None if these are all there are.
    """
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    run = at
    if found_ptr is not None:
        run = tl.load(found_ptr + at, mask=at < n, other=0)
    first = (run * RUN)[:, None]
    token = first + tl.arange(0, RUN)[None, :]
    there = (at < n)[:, None] & (token < V)
    y = tl.load(logits_ptr + token, mask=there, other=float("-inf"))
    return y.to(tl.float32), first


@triton.jit
def _gather(logits_ptr, found_ptr, values_ptr, ids_ptr, low, n, V, CHUNK: tl.constexpr):
    """Put the logits from `low` on of the runs found, and their tokens, in the order of the ids."""
    behind = tl.zeros((), tl.int32)
    for chunk in tl.range(0, tl.cdiv(n, CHUNK)):
        y, first = load_chunk(logits_ptr, found_ptr, chunk, n, V, CHUNK)
        y = y.reshape(CHUNK * RUN)
        token = (first + tl.arange(0, RUN)[None, :]).reshape(CHUNK * RUN)
        taken = ordered(y) >= low.to(tl.int32)
        at = behind + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tl.store(values_ptr + at, y, mask=taken)
        tl.store(ids_ptr + at, token, mask=taken)
        behind += tl.sum(taken.to(tl.int32))
    tl.debug_barrier()  # `found` may be written to only now


@triton.jit
def race_of_places(y, ids_ptr, first, n, cut, last, T, seed, offset, row):
    """As `race`, of gathered tokens: their ids are at their places. [CHUNK, 32] candidates.

    A Philox call for each token: their words are not beside each other.
    """
    place = first + tl.arange(0, RUN)[None, :]
    token = tl.load(ids_ptr + place, mask=place < n, other=0)
    zero = token * 0
    word = ((token >> 4) << 2) | ((token >> 1) & 3)
    r0, r1, r2, r3 = tl.philox(seed, word, zero + row, zero + offset.to(tl.int32), zero)
    odd = (token & 1) != 0
    bits = tl.where((token & 8) != 0, tl.where(odd, r3, r2), tl.where(odd, r1, r0))
    order = ordered(y)
    at = cut.to(tl.int32)
    kept = (order > at) | ((order == at) & (place <= last))
    return tl.where(kept, ordered_key(y + T * gumbel(bits), token), LOWEST_KEY)


@triton.jit
def _penalise(logits_ptr, largest_ptr, history_ptr, counts_ptr, length, repetition, presence,
              frequency, V):  # fmt: skip
    """Change the logits of the tokens in a row's history, and the largest of the runs they are in.

    The tokens are distinct, so no logit is changed twice.
    """
    BLOCK: tl.constexpr = 64
    for first in tl.range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(history_ptr + at, mask=at < length, other=-1)
        there = (token >= 0) & (token < V)
        y = tl.load(logits_ptr + token, mask=there, other=0.0)
        times = tl.load(counts_ptr + at, mask=at < length, other=0)
        y = tl.where(y > 0.0, y / repetition, y * repetition)
        y -= frequency * times.to(tl.float32) + tl.where(times > 0, presence, 0.0)
        tl.store(logits_ptr + token, y, mask=there)
    tl.debug_barrier()
    for first in tl.range(0, length, BLOCK):
        at = first + tl.arange(0, BLOCK)
        token = tl.load(history_ptr + at, mask=at < length, other=-1)
        there = (token >= 0) & (token < V)
        run = token // RUN
        members = (run * RUN)[:, None] + tl.arange(0, RUN)[None, :]
        inside = there[:, None] & (members < V)
        y = tl.load(logits_ptr + members, mask=inside, other=float("-inf"))
        # Tokens of one run write the same number.
        tl.store(largest_ptr + run, tl.reduce(y, 1, nan_max), mask=there)
    tl.debug_barrier()


@triton.jit
def _mass_of_row(logits_ptr, top, sharpness, V):
    """Sum of exp((y - top) / T) over a row, fp32."""
    BLOCK: tl.constexpr = 4096
    mass = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
        mass += tl.exp2(sharpness * (y - top))
    return tl.sum(mass)


@triton.jit
def _floor_of_top_k(order, k, above_all):
    """A lower bound of the kth largest logit: a number that k of the maxima reach, int64.

    Few more than k reach it, unless many are equal. LOWEST if fewer than k are finite.
    """
    finite = order >= LOWEST
    reach = tl.sum(finite.to(tl.int32))
    if reach < k:
        low = tl.full((), LOWEST, tl.int64)
    else:
        low = tl.min(tl.where(finite, order, 0x7FFFFFFF)).to(tl.int64)
    high = above_all
    enough = k + k // 8
    while (reach > enough) & (high - low > 1):
        middle = (low + high) >> 1
        c = tl.sum((order >= middle.to(tl.int32)).to(tl.int32))
        low = tl.where(c >= k, middle, low)
        reach = tl.where(c >= k, c, reach)
        high = tl.where(c >= k, high, middle)
    return low


@triton.jit
def _floor_of_top_p(order, top, sharpness, mass, above_all):
    """A lower bound of the smallest logit that top-p keeps: from it on the maxima have `mass`.

    LOWEST if all of them do not.
    """
    low = tl.full((), LOWEST, tl.int64)
    high = above_all
    weight = tl.exp2(sharpness * (value_of(order) - top))
    mass = mass * 1.0001  # no rounding may make the bound too high
    within = tl.sum((order >= LOWEST).to(tl.int32))
    while (within > 8) & (high - low > 1):
        middle = (low + high) >> 1
        reached = order >= middle.to(tl.int32)
        enough = tl.sum(tl.where(reached, weight, 0.0)) >= mass
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        between = (order >= low.to(tl.int32)) & (order < high.to(tl.int32))
        within = tl.sum(between.to(tl.int32))
    return low


@triton.jit
def count_from(y, cut, logits_ptr, found_ptr, n, V, CHUNK: tl.constexpr):
    """How many logits of the runs found reach a number; y are those of the first chunk."""
    total = tl.sum(tl.sum((ordered(y) >= cut.to(tl.int32)).to(tl.int32), axis=1), axis=0)
    for chunk in tl.range(1, tl.cdiv(n, CHUNK)):
        more, _ = load_chunk(logits_ptr, found_ptr, chunk, n, V, CHUNK)
        reached = (ordered(more) >= cut.to(tl.int32)).to(tl.int32)
        total += tl.sum(tl.sum(reached, axis=1), axis=0)
    return total


@triton.jit
def _count_and_mass(y, cut, top, sharpness, logits_ptr, found_ptr, n, V, CHUNK: tl.constexpr):
    """(how many logits reach a number, their mass in units of exp(top / T))."""
    reached = ordered(y) >= cut.to(tl.int32)
    weight = tl.where(reached, tl.exp2(sharpness * (y - top)), 0.0)
    count = tl.sum(reached.to(tl.int32), axis=1)
    for chunk in tl.range(1, tl.cdiv(n, CHUNK)):
        more, _ = load_chunk(logits_ptr, found_ptr, chunk, n, V, CHUNK)
        reached = ordered(more) >= cut.to(tl.int32)
        weight += tl.where(reached, tl.exp2(sharpness * (more - top)), 0.0)
        count += tl.sum(reached.to(tl.int32), axis=1)
    return tl.sum(count, axis=0), tl.sum(tl.sum(weight, axis=1), axis=0)


@triton.jit
def cut_top_k(y, k, low, count, above_all, logits_ptr, found_ptr, n, V, CHUNK: tl.constexpr):
    """(cutoff, how many reach it, quota of those at it) such that k tokens are kept.

    `count`, more than k, reach `low`. Ends with exactly k that reach the cutoff, or with equal
    logits on both sides of the kth place.
    """
    high = above_all
    above = tl.zeros((), tl.int32)  # how many reach `high`
    while (count > k) & (high - low > 1):
        middle = (low + high) >> 1
        c = count_from(y, middle, logits_ptr, found_ptr, n, V, CHUNK)
        above = tl.where(c >= k, above, c)
        high = tl.where(c >= k, high, middle)
        low = tl.where(c >= k, middle, low)
        count = tl.where(c >= k, c, count)
    return low, count, tl.where(count > k, k - above, V)


@triton.jit
def cut_top_p(y, p, total, low, count, quota, k, above_all, top, sharpness, logits_ptr, found_ptr,
               n, V, CHUNK: tl.constexpr):  # fmt: skip
    """(cutoff, how many reach it, quota of those at it) after top-p, from those before it.

    total: mass that p is a part of, if it is known, else 0: that of what is kept so far.
    """
    _, mass = _count_and_mass(y, low, top, sharpness, logits_ptr, found_ptr, n, V, CHUNK)
    each = tl.exp2(sharpness * (value_of(low.to(tl.int32)) - top))
    # Of equal logits at the kth place some are cut off already.
    kept = tl.where(quota < V, mass - (count - k).to(tl.float32) * each, mass)
    wanted = p * tl.where(total > 0.0, total, kept)
    start = low
    high = above_all
    above = tl.zeros((), tl.int32)
    mass_above = tl.zeros((), tl.float32)
    while (count - above > 1) & (high - low > 1):
        middle = (low + high) >> 1
        c, m = _count_and_mass(y, middle, top, sharpness, logits_ptr, found_ptr, n, V, CHUNK)
        # The first token is kept, however small p is.
        enough = (m >= wanted) & (c > 0)
        above = tl.where(enough, above, c)
        mass_above = tl.where(enough, mass_above, m)
        high = tl.where(enough, high, middle)
        low = tl.where(enough, middle, low)
        count = tl.where(enough, c, count)
    ties = count - above
    each = tl.exp2(sharpness * (value_of(low.to(tl.int32)) - top))
    needed = tl.ceil((wanted - mass_above) / each)
    needed = tl.maximum(tl.minimum(needed, ties.to(tl.float32)), 1.0).to(tl.int32)
    allowed = tl.where(low == start, quota, V)
    final = tl.where(ties > 1, tl.minimum(needed, allowed), allowed)
    trimmed = final < ties
    return low, tl.where(trimmed, above + final, count), tl.where(trimmed, final, V)


@triton.jit
def last_token(y, first, cut, quota, logits_ptr, found_ptr, n, V, CHUNK: tl.constexpr):
    """The token up to which there are `quota` with logits at the cutoff."""
    low = tl.full((), -1, tl.int32)
    high = tl.full((), 0, tl.int32) + V - 1
    while high - low > 1:
        middle = (low + high) >> 1
        c = _ties_up_to(y, first, cut, middle)
        for chunk in tl.range(1, tl.cdiv(n, CHUNK)):
            more, first_of_more = load_chunk(logits_ptr, found_ptr, chunk, n, V, CHUNK)
            c += _ties_up_to(more, first_of_more, cut, middle)
        high = tl.where(c >= quota, middle, high)
        low = tl.where(c >= quota, low, middle)
    return high


@triton.jit
def _ties_up_to(y, first, cut, token):
    """How many tokens up to this one have logits at the cutoff."""
    tie = (ordered(y) == cut.to(tl.int32)) & (first + tl.arange(0, RUN)[None, :] <= token)
    return tl.sum(tl.sum(tie.to(tl.int32), axis=1), axis=0)


@triton.jit
def race(y, first, cut, last, T, seed, offset, row):
    """The best candidate of each of a chunk's Philox words, [CHUNK, 8]: kept tokens only.

    Scores are those of `candidates` (kernels/_helper.py).
    """
    CHUNK: tl.constexpr = y.shape[0]
    y0, y1, y2, y3 = split_words(y)
    word = tl.arange(0, RUN // 4)[None, :]
    counter = first // 4 + word  # four words for 16 tokens
    # Always 0; ties the counters to the layout of the logits, as in `candidates`.
    zero = (y0 < float("-inf")).to(tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, counter + zero, row + zero, offset.to(tl.int32) + zero, zero)
    token = first + (word >> 2) * 16 + (word & 3) * 2
    best = tl.full((CHUNK, RUN // 4), LOWEST_KEY, tl.int64)
    best = tl.maximum(best, _candidate(y0, r0, token, cut, last, T))
    best = tl.maximum(best, _candidate(y1, r1, token + 1, cut, last, T))
    best = tl.maximum(best, _candidate(y2, r2, token + 8, cut, last, T))
    return tl.maximum(best, _candidate(y3, r3, token + 9, cut, last, T))


@triton.jit
def _candidate(y, bits, token, cut, last, T):
    """Packed candidates of tokens that are kept, LOWEST_KEY of the others."""
    order = ordered(y)
    at = cut.to(tl.int32)
    kept = (order > at) | ((order == at) & (token <= last))
    return tl.where(kept, ordered_key(y + T * gumbel(bits), token), LOWEST_KEY)
