"""Device code of the screened sampler: two bytes of hidden, the screen, the exact rest.

Three launches on one stream. `screen_hidden_kernel` rounds hidden to 16 bits and puts the state of
each row to its start, so no memory has to be cleared. `screen_kernel` streams the int8 copy of the
head, shares the largest lower bound of each row, and keeps what may exceed it: records of a Philox
word of four tokens each, per program and row. When a program ends, the bound has risen, and the few
records that still reach it go to the list of the row. `resolve_kernel` computes their logits from
the weight, in the order of summation of the fused kernels, and takes the best score. A row with
more records than there is room for is sampled from its whole logits there.

`_screen.py` is the same in torch and defines the constants; docs/screened-head.md proves it.
"""

import triton
import triton.language as tl

from fsbench.kernels import _screen
from fsbench.kernels._epilogue import (
    allowed_words,
    best_of_tile,
    capped,
    masked,
    processed,
    shared_bias,
)
from fsbench.kernels._flash_sampling_kernel import _per_row
from fsbench.kernels._helper import (
    LOWEST_KEY,
    gumbel,
    halves,
    nan_max,
    ordered_key,
    random_words,
    split_words,
    temperatures,
    token_of_key,
)
from fsbench.kernels._mainloop import _load_tile, first_column, program_share, tile_logits
from fsbench.kernels._screened_head import LARGEST_ENTRY as _LARGEST_ENTRY

LARGEST_ENTRY = tl.constexpr(_LARGEST_ENTRY)
LARGEST_STEPS = tl.constexpr(float(_screen.LARGEST_STEPS))
SMALLEST_MAXIMUM = tl.constexpr(_screen.SMALLEST_MAXIMUM)
LARGEST_TEMPERATURE = tl.constexpr(_screen.LARGEST_TEMPERATURE)
INFLATION = tl.constexpr(_screen.INFLATION)
ROUNDING = tl.constexpr(_screen.ROUNDING)
NOISE_SLACK = tl.constexpr(_screen.NOISE_SLACK * _screen.INFLATION)
BIAS_SLACK = tl.constexpr(_screen.BIAS_SLACK)
CAP_SLACK = tl.constexpr(_screen.CAP_SLACK)
ABSOLUTE_SLACK = tl.constexpr(_screen.ABSOLUTE_SLACK)
LOWEST_BOUND = tl.constexpr(-(2**31))
"""Of a row without a lower bound yet; below that of any number (see _ordered)."""
ROW_NUMBERS = tl.constexpr(3)
"""step, reach and spread of a row, one after the other."""


@triton.jit
def _ordered(x):
    """fp32 -> int32 of the same order; no NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _unordered(key):
    """The inverse of _ordered; -inf for LOWEST_BOUND."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return tl.where(key == LOWEST_BOUND, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def screen_hidden_kernel(
    hidden_ptr,  # [B, D]
    codes_ptr,  # [blocks of rows, 2, BLOCK_B, D] int8, out: high bytes, then low bytes
    numbers_ptr,  # [ROW_NUMBERS, B] fp32, out
    lower_ptr,  # [B] int32, out: LOWEST_BOUND
    overflow_ptr,  # [B] int32, out: 0
    keys_ptr,  # [B] int64, out: LOWEST_KEY
    listed_ptr,  # [B] int32, out: 0
    found_ptr,  # [B] int32, out: 0
    arrivals_ptr,  # [1] int32, out: 0
    B,
    D,
    gamma,  # accumulation_error(D)
    norm_inflation,  # 1 + (D + 4) 2^-24
    root,  # sqrt(D)
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    b = tl.program_id(0)
    cols = tl.arange(0, BLOCK_D)
    row = hidden_ptr + b.to(tl.int64) * D
    largest = tl.zeros((BLOCK_D,), tl.float32)
    for d in range(0, D, BLOCK_D):
        h = tl.load(row + d + cols, mask=d + cols < D, other=0.0).to(tl.float32)
        largest = nan_max(largest, tl.abs(h))
    top = tl.reduce(largest, 0, nan_max)
    screened = top <= LARGEST_ENTRY  # False for NaN
    rounded = screened & (top >= SMALLEST_MAXIMUM)
    unit = tl.where(rounded, top, 1.0)
    inverse = 1.0 / unit
    squares = tl.zeros((BLOCK_D,), tl.float32)
    errors = tl.zeros((BLOCK_D,), tl.float32)
    out = codes_ptr + ((b // BLOCK_B * 2) * BLOCK_B + b % BLOCK_B).to(tl.int64) * D
    for d in range(0, D, BLOCK_D):
        there = d + cols < D
        h = tl.load(row + d + cols, mask=there, other=0.0).to(tl.float32)
        x = tl.where(rounded, h, 0.0) * inverse
        # Any integer near enough would do: the error is measured, not assumed.
        code = tl.floor(x * LARGEST_STEPS + 0.5)
        high = tl.floor((code + 128.0) * (1.0 / 256.0))
        error = x - code * (1.0 / LARGEST_STEPS)
        squares += x * x
        errors += error * error
        tl.store(out + d + cols, high.to(tl.int8), mask=there)
        tl.store(out + BLOCK_B * D + d + cols, (code - 256.0 * high).to(tl.int8), mask=there)
    size = tl.sqrt(tl.sum(squares, 0)) * norm_inflation + 5.551115123125783e-17
    spread = tl.sqrt(tl.sum(errors, 0)) * norm_inflation + 5.551115123125783e-17
    spread += 9.5367431640625e-07 * size
    size = tl.where(rounded, unit * size, root * SMALLEST_MAXIMUM)
    spread = tl.where(rounded, unit * spread, root * SMALLEST_MAXIMUM)
    reach = size * (1.0 + gamma) * INFLATION
    spread = (spread + (gamma + ROUNDING) * (size + spread)) * INFLATION
    step = tl.where(rounded, top * (1.0 / LARGEST_STEPS), 0.0)
    tl.store(numbers_ptr + b, step)
    tl.store(numbers_ptr + B + b, tl.where(screened, reach, float("inf")))
    tl.store(numbers_ptr + 2 * B + b, tl.where(screened, spread, 0.0))
    tl.store(lower_ptr + b, LOWEST_BOUND)
    tl.store(overflow_ptr + b, 0)
    tl.store(keys_ptr + b, tl.full((), LOWEST_KEY, tl.int64))
    tl.store(listed_ptr + b, 0)
    tl.store(found_ptr + b, 0)
    if b == 0:
        tl.store(arrivals_ptr, 0)


@triton.jit
def _screened_logits(codes, copy, pid_b, v0, V, D, BLOCK_B: tl.constexpr,
                     BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, V_ON_M: tl.constexpr,
                     USE_TMA: tl.constexpr):  # fmt: skip
    """256 code . high + code . low, fp32 [BLOCK_B, BLOCK_V]: the integer sums are exact."""
    high = tl.zeros((BLOCK_V, BLOCK_B) if V_ON_M else (BLOCK_B, BLOCK_V), tl.int32)
    low = tl.zeros((BLOCK_V, BLOCK_B) if V_ON_M else (BLOCK_B, BLOCK_V), tl.int32)
    steps = tl.cdiv(D, BLOCK_D)
    # As in the fused kernels, programs begin at different columns (_mainloop.tile_logits).
    first = first_column(v0, D) // BLOCK_D
    for step in range(steps):
        d0 = (first + step) % steps * BLOCK_D
        w = _load_tile(copy, v0, d0, BLOCK_V, BLOCK_D, V, D, USE_TMA)
        b0 = pid_b * 2 * BLOCK_B
        end = b0 + 2 * BLOCK_B
        h_high = _load_tile(codes, b0, d0, BLOCK_B, BLOCK_D, end, D, USE_TMA)
        h_low = _load_tile(codes, b0 + BLOCK_B, d0, BLOCK_B, BLOCK_D, end, D, USE_TMA)
        if V_ON_M:
            high = tl.dot(w, h_high.T, high, out_dtype=tl.int32)
            low = tl.dot(w, h_low.T, low, out_dtype=tl.int32)
        else:
            high = tl.dot(h_high, w.T, high, out_dtype=tl.int32)
            low = tl.dot(h_low, w.T, low, out_dtype=tl.int32)
    both = high.to(tl.float32) * 256.0 + low.to(tl.float32)
    return both.T if V_ON_M else both


@triton.jit
def _ends(z, scale, residual, norm, bias, row_bias, extra, reach, spread, soft_cap, temperature,
          noise, allowed):  # fmt: skip
    """(lower, upper) of scores y + T g, as _screen.score_bounds; where not allowed, -inf.

    Args:
        z, noise, row_bias or None, allowed: [R, W]. scale, residual, norm, bias or None: [1, W].
        extra, reach, spread, temperature: [R, 1]. z is still to be multiplied by scale.
    """
    y = z * scale
    bound = residual * reach + (norm * spread + extra)
    known = bound < float("inf")
    if soft_cap is not None:
        y = capped(y, soft_cap)
    # A bias of -inf forbids a token, unless its logit may be undefined.
    if bias is not None:
        y += tl.where(known, bias, 0.0)
        bound += tl.where(tl.abs(bias) < float("inf"), tl.abs(bias) * BIAS_SLACK, 0.0)
    if row_bias is not None:
        y += tl.where(known, row_bias, 0.0)
        bound += tl.where(tl.abs(row_bias) < float("inf"), tl.abs(row_bias) * BIAS_SLACK, 0.0)
    score = y + temperature * noise
    open_ = allowed & (score != float("-inf"))
    upper = score + bound
    upper = tl.where(known & (upper == upper), upper, float("inf"))
    lower = tl.where(open_ & (upper < float("inf")), score - bound, float("-inf"))
    return lower, tl.where(open_, upper, float("-inf"))


@triton.jit
def _column_halves(x):
    """[W] -> its first and second half."""
    return x.reshape(2, x.shape[0] // 2).permute(1, 0).split()


@triton.jit
def _column_words(x):
    """[W] -> four [1, W / 4], as _helper.split_words."""
    return split_words(x[None, :])


@triton.jit
def _settings(seed_ptr, offset_ptr, temperature, rows, B, SEED_PER_ROW: tl.constexpr,
              OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr):  # fmt: skip
    """(seed, number in the noise, offset, T, 1 / T) of rows: [R, 1], or scalar if one for all."""
    seed = _per_row(seed_ptr, rows, B, SEED_PER_ROW)
    row = rows[:, None] * 0 if SEED_PER_ROW else rows[:, None]
    offset = tl.zeros((), tl.int64)
    if offset_ptr is not None:
        offset = _per_row(offset_ptr, rows, B, OFFSET_PER_ROW)
    if TEMPERATURE_PER_ROW:
        T = _per_row(temperature, rows, B, True)
    else:
        T = tl.full((1, 1), temperature, tl.float32)
    T, inverse_temperature = temperatures(T)
    return seed, row, offset, T, inverse_temperature


@triton.jit
def _leave(z, words, scale, residual, norm, bias, v0, rows, row, seed, offset, sample, T, extra,
           reach, spread, soft_cap, row_bias_ptr, limit, count, mine, apart, B, V,
           NOISE: tl.constexpr, ROOM: tl.constexpr, SLICE: tl.constexpr):  # fmt: skip
    """Leave records of what of a tile [R, WIDTH] may win, SLICE columns at a time.

    Returns:
        (limit, count), [R] each: the largest lower bound and the number of records so far.
    """
    R: tl.constexpr = z.shape[0]
    WIDTH: tl.constexpr = z.shape[1]
    if WIDTH > SLICE:
        low, high = halves(z)
        words_low = None
        words_high = None
        if words is not None:
            words_low, words_high = halves(words)
        bias_low = None
        bias_high = None
        if bias is not None:
            bias_low, bias_high = _column_halves(bias)
        scale_low, scale_high = _column_halves(scale)
        residual_low, residual_high = _column_halves(residual)
        norm_low, norm_high = _column_halves(norm)
        limit, count = _leave(
            low, words_low, scale_low, residual_low, norm_low, bias_low, v0, rows, row, seed,
            offset, sample, T, extra, reach, spread, soft_cap, row_bias_ptr, limit, count, mine,
            apart, B, V, NOISE, ROOM, SLICE,
        )  # fmt: skip
        return _leave(
            high, words_high, scale_high, residual_high, norm_high, bias_high, v0 + WIDTH // 2,
            rows, row, seed, offset, sample, T, extra, reach, spread, soft_cap, row_bias_ptr,
            limit, count, mine, apart, B, V, NOISE, ROOM, SLICE,
        )  # fmt: skip
    else:
        WORDS: tl.constexpr = WIDTH // 4
        word = tl.arange(0, WORDS)
        first = (v0 + (word >> 2) * 16 + (word & 3) * 2)[None, :]
        z0, z1, z2, z3 = split_words(z)
        s0, s1, s2, s3 = _column_words(scale)
        e0, e1, e2, e3 = _column_words(residual)
        n0, n1, n2, n3 = _column_words(norm)
        c0 = None
        c1 = None
        c2 = None
        c3 = None
        if bias is not None:
            c0, c1, c2, c3 = _column_words(bias)
        d0 = None
        d1 = None
        d2 = None
        d3 = None
        if row_bias_ptr is not None:
            at = row_bias_ptr + rows.to(tl.int64)[:, None] * V
            d0 = _row_bias(at, rows, first, B, V)
            d1 = _row_bias(at, rows, first + 1, B, V)
            d2 = _row_bias(at, rows, first + 8, B, V)
            d3 = _row_bias(at, rows, first + 9, B, V)
        a0 = first < V
        a1 = first + 1 < V
        a2 = first + 8 < V
        a3 = first + 9 < V
        if words is not None:
            m0, m1, m2, m3 = split_words(masked(tl.zeros((R, WIDTH), tl.float32), words))
            a0 &= m0 == 0.0
            a1 &= m1 == 0.0
            a2 &= m2 == 0.0
            a3 &= m3 == 0.0
        g0 = 0.0
        g1 = 0.0
        g2 = 0.0
        g3 = 0.0
        if NOISE == "token":
            # Always 0; ties the noise to the layout of z, and makes a slice wait for the one
            # before, as in _helper.candidates. A limit is never NaN.
            zero = ((z0 < float("-inf")) | (limit != limit)[:, None]).to(tl.int32)
            r0, r1, r2, r3 = random_words(v0, word, row, seed, offset, sample, zero)
            g0 = gumbel(r0)
            g1 = gumbel(r1)
            g2 = gumbel(r2)
            g3 = gumbel(r3)
        l0, u0 = _ends(z0, s0, e0, n0, c0, d0, extra, reach, spread, soft_cap, T, g0, a0)
        l1, u1 = _ends(z1, s1, e1, n1, c1, d1, extra, reach, spread, soft_cap, T, g1, a1)
        l2, u2 = _ends(z2, s2, e2, n2, c2, d2, extra, reach, spread, soft_cap, T, g2, a2)
        l3, u3 = _ends(z3, s3, e3, n3, c3, d3, extra, reach, spread, soft_cap, T, g3, a3)
        lower = tl.max(tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)), axis=1)
        limit = tl.maximum(limit, lower)
        least = limit[:, None]
        lanes = _possible(u0, least) | (_possible(u1, least) << 1)
        lanes |= (_possible(u2, least) << 2) | (_possible(u3, least) << 3)
        lanes = tl.where((rows < B)[:, None], lanes, 0)
        upper = tl.maximum(tl.maximum(u0, u1), tl.maximum(u2, u3))
        kept = (lanes != 0).to(tl.int32)
        at = count[:, None] + tl.cumsum(kept, axis=1) - kept
        fits = (kept != 0) & (at < ROOM)
        tl.store(mine + at, upper.to(tl.int32, bitcast=True), mask=fits)
        tl.store(mine + apart + at, (((v0 >> 4) * 4 + word)[None, :] << 4) | lanes, mask=fits)
        return limit, count + tl.sum(kept, axis=1)


@triton.jit
def _row_bias(at, rows, token, B, V):
    there = (rows < B)[:, None] & (token < V)
    return tl.load(at + token, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["B", "V"])
def screen_kernel(
    codes,  # [blocks of rows * 2 * BLOCK_B, D] int8, descriptor (USE_TMA) or pointer
    copy,  # [V, D] int8, likewise
    scale_ptr,  # [V] fp32
    residual_ptr,  # [V] fp32
    norm_ptr,  # [V] fp32
    numbers_ptr,  # [ROW_NUMBERS, B] fp32
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or None
    row_bias_ptr,  # [B, V] or None
    mask_ptr,  # [B, mask_words] int32, or None
    lower_ptr,  # [B] int32: largest lower bound of each row so far
    overflow_ptr,  # [B] int32, out: 1 in rows with too many records
    records_ptr,  # [2, programs per block of rows, B, ROOM] int32, scratch: upper bounds; words
    listed_ptr,  # [B] int32, out: records of each row, also those beyond its LIST
    list_ptr,  # [2, B, LIST] int32, out: upper bounds; words and lanes
    B,
    V,
    D,
    mask_words,
    sample,
    NOISE: tl.constexpr,  # "token" or "none" (greedy)
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    ROOM: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    rows = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    idle = rows >= B
    seed, row, offset, T, _ = _settings(
        seed_ptr,
        offset_ptr,
        temperature,
        rows,
        B,
        SEED_PER_ROW,
        OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )
    step = tl.load(numbers_ptr + rows, mask=~idle, other=0.0)[:, None]
    reach = tl.load(numbers_ptr + B + rows, mask=~idle, other=0.0)[:, None]
    spread = tl.load(numbers_ptr + 2 * B + rows, mask=~idle, other=0.0)[:, None]
    sane = T <= LARGEST_TEMPERATURE  # False for NaN
    extra = tl.where(sane, T * NOISE_SLACK + 2 * ABSOLUTE_SLACK, float("inf"))
    T = tl.where(sane, T, 0.0)
    if soft_cap is not None:
        extra += soft_cap * CAP_SLACK

    mine = records_ptr + ((pid_v * B + rows).to(tl.int64) * ROOM)[:, None]
    apart = programs_v.to(tl.int64) * B * ROOM
    count = tl.zeros((BLOCK_B,), tl.int32)
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        offs_v = v0 + tl.arange(0, BLOCK_V)
        inside = offs_v < V
        scale = tl.load(scale_ptr + offs_v, mask=inside, other=0.0)
        residual = tl.load(residual_ptr + offs_v, mask=inside, other=0.0)
        norm = tl.load(norm_ptr + offs_v, mask=inside, other=0.0)
        bias = None
        if bias_ptr is not None:
            bias = shared_bias(bias_ptr, v0, V, BLOCK_V)
        # Other programs raise it meanwhile; an older one only leaves over more.
        limit = tl.load(lower_ptr + rows, mask=~idle, other=LOWEST_BOUND, volatile=True)
        z = _screened_logits(
            codes, copy, pid_b, v0, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        limit, count = _leave(
            z * step, words, scale, residual, norm, bias, v0, rows, row, seed, offset, sample, T,
            extra, reach, spread, soft_cap, row_bias_ptr, _unordered(limit), count, mine, apart,
            B, V, NOISE, ROOM, SLICE,
        )  # fmt: skip
        tl.atomic_max(lower_ptr + rows, _ordered(limit), mask=(~idle) & (limit > float("-inf")))
    tl.debug_barrier()
    limit = _unordered(tl.load(lower_ptr + rows, mask=~idle, other=LOWEST_BOUND, volatile=True))
    slot = tl.arange(0, ROOM)[None, :]
    there = (~idle)[:, None] & (slot < count[:, None])
    upper = tl.load(mine + slot, mask=there, other=0)
    record = tl.load(mine + apart + slot, mask=there, other=0)
    kept = (there & (upper.to(tl.float32, bitcast=True) >= limit[:, None])).to(tl.int32)
    number = tl.sum(kept, axis=1)
    first = tl.atomic_add(listed_ptr + rows, number, mask=(~idle) & (number > 0))
    at = first[:, None] + tl.cumsum(kept, axis=1) - kept
    fits = (kept != 0) & (at < LIST)
    at = list_ptr + rows.to(tl.int64)[:, None] * LIST + at
    tl.store(at, upper, mask=fits)
    tl.store(at + B.to(tl.int64) * LIST, record, mask=fits)
    full = (count > ROOM) | ((number > 0) & (first + number > LIST))
    tl.store(overflow_ptr + rows, 1, mask=(~idle) & full)


@triton.jit
def _possible(upper, least):
    return ((upper >= least) & (upper > float("-inf"))).to(tl.int32)


@triton.jit(do_not_specialize=["B", "V", "per_row"])
def resolve_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer: for rows that are computed in full
    weight,  # [>= V, D] likewise
    hidden_ptr,  # the same as pointers: for single tokens
    weight_ptr,
    seed_ptr,
    offset_ptr,
    temperature,
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    mask_ptr,
    lower_ptr,
    overflow_ptr,
    listed_ptr,
    list_ptr,
    keys_ptr,  # [B] int64
    found_ptr,  # [B] int32: tokens recomputed; -1 in rows computed in full
    arrivals_ptr,  # [1] int32
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    B,
    V,
    D,
    mask_words,
    sample,
    per_row,  # programs for the list of each row
    NOISE: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    LIST: tl.constexpr,
    AT_ONCE: tl.constexpr,  # tokens of a step: four of each record
    ROWS: tl.constexpr,  # rows of the instruction: 64 for that of the fused kernels on Hopper
    STEP: tl.constexpr,  # columns of one step for single tokens; divides 256
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    SLICE: tl.constexpr,
):
    b = tl.program_id(0) // per_row
    if tl.load(overflow_ptr + b) == 0:
        limit = _unordered(tl.load(lower_ptr + b))
        seed, offset, row, T = _request(
            seed_ptr, offset_ptr, temperature, b, SEED_PER_ROW, OFFSET_PER_ROW,
            TEMPERATURE_PER_ROW,
        )  # fmt: skip
        RECORDS: tl.constexpr = AT_ONCE // 4
        number = tl.load(listed_ptr + b)
        slot = tl.arange(0, AT_ONCE)
        lane = slot % 4
        for first in range(tl.program_id(0) % per_row * RECORDS, number, per_row * RECORDS):
            i = first + slot // 4
            at = list_ptr + b.to(tl.int64) * LIST + i
            upper = tl.load(at, mask=i < number, other=0).to(tl.float32, bitcast=True)
            record = tl.load(at + B.to(tl.int64) * LIST, mask=i < number, other=0)
            there = (i < number) & (upper >= limit) & (((record >> lane) & 1) != 0)
            word = record >> 4
            token = (word >> 2) * 16 + (word & 3) * 2 + (lane & 1) + (lane >> 1) * 8
            token = tl.where(there, token, 0)
            y = _single_logits(hidden_ptr, weight_ptr, b, token, there, D, AT_ONCE, ROWS, STEP)
            if soft_cap is not None:
                y = capped(y, soft_cap)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + token).to(tl.float32)
            if row_bias_ptr is not None:
                y += tl.load(row_bias_ptr + b.to(tl.int64) * V + token).to(tl.float32)
            score = y
            if NOISE == "token":
                score = y + T * gumbel(_word(token, row, seed, offset, sample))
            score = tl.where(score == score, score, float("inf"))
            key = tl.where(there, ordered_key(score, token), LOWEST_KEY)
            tl.atomic_max(keys_ptr + b, tl.max(key, 0))
            tl.atomic_add(found_ptr + b, tl.sum(there.to(tl.int32), 0))

    # Whole rows, shared by all programs.
    for block in range(0, tl.cdiv(B, BLOCK_B)):
        rows = block * BLOCK_B + tl.arange(0, BLOCK_B)
        full = tl.load(overflow_ptr + rows, mask=rows < B, other=0)
        if tl.max(full, 0) != 0:
            _whole_rows(
                hidden, weight, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr,
                row_bias_ptr, mask_ptr, keys_ptr, found_ptr, block * BLOCK_B, rows, full != 0,
                B, V, D, mask_words, sample, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
                TEMPERATURE_PER_ROW, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA, SLICE,
            )  # fmt: skip

    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr, 1) == tl.num_programs(0) - 1:
        for first in range(0, B, 128):
            rows = first + tl.arange(0, 128)
            there = rows < B
            # An atomic reads what the other programs have left.
            key = tl.atomic_max(keys_ptr + rows, tl.full((128,), LOWEST_KEY, tl.int64), mask=there)
            token = token_of_key(key)
            tl.store(tokens_ptr + rows, token.to(tl.int64), mask=there)
            tl.store(valid_ptr + rows, token >= 0, mask=there)


@triton.jit
def _request(seed_ptr, offset_ptr, temperature, b, SEED_PER_ROW: tl.constexpr,
             OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr):  # fmt: skip
    """(seed, offset, row, T) of one row."""
    seed = tl.load(seed_ptr + (b if SEED_PER_ROW else 0))
    row = b * 0 if SEED_PER_ROW else b
    offset = tl.zeros((), tl.int64)
    if offset_ptr is not None:
        offset = tl.load(offset_ptr + (b if OFFSET_PER_ROW else 0))
    T = tl.load(temperature + b) if TEMPERATURE_PER_ROW else tl.full((), temperature, tl.float32)
    T, _ = temperatures(T)
    return seed, offset, row, T


@triton.jit
def _single_logits(hidden_ptr, weight_ptr, b, token, there, D, AT_ONCE: tl.constexpr,
                   ROWS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """hidden[b] . weight[token] of AT_ONCE tokens, fp32, in the order of tile_logits.

    Tokens begin their sums at columns of their own. So row i of one operand is hidden from the
    first column of token i on, and the logits are the diagonal of the product.
    """
    i = tl.arange(0, ROWS)
    steps = tl.cdiv(D, STEP)
    first = first_column(token, D) // STEP
    # The same for the rows of hidden: the token of row i, by a gather through a one-hot product.
    own = i[:, None] == tl.arange(0, AT_ONCE)[None, :]
    first_of_row = tl.sum(tl.where(own, first[None, :], 0), axis=1)
    row_there = tl.sum(tl.where(own & there[None, :], 1, 0), axis=1) != 0
    d = tl.arange(0, STEP)[None, :]
    h_row = hidden_ptr + b.to(tl.int64) * D
    w_row = weight_ptr + token.to(tl.int64)[:, None] * D
    acc = tl.zeros((ROWS, AT_ONCE), tl.float32)
    for step in range(steps):
        w_cols = ((first + step) % steps * STEP)[:, None] + d
        h_cols = ((first_of_row + step) % steps * STEP)[:, None] + d
        w = tl.load(w_row + w_cols, mask=there[:, None] & (w_cols < D), other=0.0)
        h = tl.load(h_row + h_cols, mask=row_there[:, None] & (h_cols < D), other=0.0)
        acc = tl.dot(h, w.T, acc, input_precision="ieee")
    return tl.sum(tl.where(own, acc, 0.0), axis=0)


@triton.jit
def _word(token, row, seed, offset, sample):
    """The 32 random bits of each token."""
    zero = token * 0
    word = (token >> 4) * 4 + ((token >> 1) & 3)
    r0, r1, r2, r3 = tl.philox(seed, word, row + zero, offset.to(tl.int32) + zero, zero + sample)
    even = tl.where((token & 8) != 0, r2, r0)
    odd = tl.where((token & 8) != 0, r3, r1)
    return tl.where((token & 1) != 0, odd, even)


@triton.jit
def _whole_rows(hidden, weight, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr,
                row_bias_ptr, mask_ptr, keys_ptr, found_ptr, b0, rows, full, B, V, D,
                mask_words, sample, NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr,
                OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr,
                BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
                V_ON_M: tl.constexpr, USE_TMA: tl.constexpr, SLICE: tl.constexpr):  # fmt: skip
    """What flash_sample does for a block of rows; only those of `full` count."""
    seed, row, offset, T, inverse_temperature = _settings(
        seed_ptr,
        offset_ptr,
        temperature,
        rows,
        B,
        SEED_PER_ROW,
        OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )
    best = tl.full((BLOCK_B, SLICE // 4), LOWEST_KEY, tl.int64)
    best_logit = tl.zeros((BLOCK_B, SLICE // 4), tl.float32)
    for tile_v in range(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.num_programs(0)):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        bias = None
        if bias_ptr is not None:
            offs_v = v0 + tl.arange(0, BLOCK_V)
            bias = tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)
        logits = tile_logits(
            hidden, weight, b0, v0, v0, B, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        logits = processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words)
        best, best_logit = best_of_tile(
            logits, v0, row, seed, offset, T, inverse_temperature, sample, best, best_logit,
            1, NOISE, TEMPERATURE_PER_ROW, False,
        )  # fmt: skip
    tl.atomic_max(keys_ptr + rows, tl.max(best, axis=1), mask=full & (rows < B))
    tl.store(found_ptr + rows, -1, mask=full & (rows < B))
