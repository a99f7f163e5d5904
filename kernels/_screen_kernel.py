"""Device code of the screened sampler's first launch: hidden in two bytes, and the screen.

The programs first round hidden to 16 bits, row by row, while the first bytes of the int8 copy come
in. A row is claimed, so a program waits only for programs that run, and the launch ends whatever
else the GPU is doing. Then they stream the copy, share the largest lower bound of each row, and
keep what may exceed it: records of a Philox word of four tokens each, per program and row. When a
program ends, the bound has risen, and the few tokens that still reach it go to the list of the
row, for the second launch (_resolve_kernel.py).

`_screen.py` is the same in torch and defines the constants; docs/screened-head.md proves it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from fsbench.kernels import _screen
from fsbench.kernels._epilogue import allowed_words, capped, masked
from fsbench.kernels._flash_sampling_kernel import _per_row
from fsbench.kernels._helper import halves, nan_max, random_words, split_words, temperatures
from fsbench.kernels._mainloop import _load_tile, first_column, program_share
from fsbench.kernels._screened_head import LARGEST_ENTRY as _LARGEST_ENTRY

LARGEST_ENTRY = tl.constexpr(_LARGEST_ENTRY)
LARGEST_STEPS = tl.constexpr(float(_screen.LARGEST_STEPS))
SMALLEST_MAXIMUM = tl.constexpr(_screen.SMALLEST_MAXIMUM)
LARGEST_TEMPERATURE = tl.constexpr(_screen.LARGEST_TEMPERATURE)
INFLATION = tl.constexpr(_screen.INFLATION)
ROUNDING = tl.constexpr(_screen.ROUNDING)
NOISE_SLACK = tl.constexpr(_screen.ROUGH_NOISE_SLACK * _screen.INFLATION)
BIAS_SLACK = tl.constexpr(_screen.BIAS_SLACK)
CAP_SLACK = tl.constexpr(_screen.CAP_SLACK)
ABSOLUTE_SLACK = tl.constexpr(_screen.ABSOLUTE_SLACK)
LOWEST_BOUND = tl.constexpr(-3.0e38)
"""Of a row without a lower bound yet: below every score, above the -inf of forbidden tokens."""
ROW_NUMBERS = tl.constexpr(3)
"""step, reach and spread of a row, one after the other."""
CLAIMED = tl.constexpr(0)
"""Counters: rows of hidden that programs have taken,"""
ROUNDED = tl.constexpr(1)
"""that are rounded,"""
ARRIVED = tl.constexpr(2)
"""and programs of the second launch that are done."""
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def bound_key(x):
    """fp32 -> int64 of the same order, above the lowest one; no NaN."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) << 32


@triton.jit
def bound_of_key(key):
    """The inverse of bound_key; LOWEST_BOUND for a key at rest."""
    ordered = (key >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    # A key at rest has bits that are no number.
    x = tl.where(ordered == -(2**31), 0, bits).to(tl.float32, bitcast=True)
    return tl.where(ordered == -(2**31), LOWEST_BOUND, x)


@triton.jit
def code_row(b, part):
    """Row of the codes that has the high (part 0) or low bytes (1) of row b of hidden.

    Eight rows' high bytes, then their low ones, and so on: so a thread of a tensor core that has
    the sum of one has that of the other.
    """
    return b // 8 * 16 + part * 8 + b % 8


@triton.jit
def _round_row(hidden_ptr, codes_ptr, numbers_ptr, cols, b, B, D, gamma, norm_inflation, root):
    """Two bytes of row b of hidden, and its step, reach and spread (_screen.screen_hidden).

    Args:
        hidden_ptr: [B, D]. codes_ptr: int8 [blocks of rows * 2 BLOCK_B, D]; see code_row.
        numbers_ptr: fp32 [ROW_NUMBERS, B]. gamma: accumulation_error(D).
        norm_inflation: 1 + (D + 4) 2^-24. root: sqrt(D).
        cols: 0, 1, ... of as many columns as are taken at a time.
    """
    CHUNK: tl.constexpr = cols.shape[0]
    row = hidden_ptr + b.to(tl.int64) * D
    nothing = (cols * 0).to(tl.float32)
    largest = nothing
    for d in range(0, D, CHUNK):
        h = tl.load(row + d + cols, mask=d + cols < D, other=0.0).to(tl.float32)
        largest = nan_max(largest, tl.abs(h))
    top = tl.reduce(largest, 0, nan_max)
    screened = top <= LARGEST_ENTRY  # False for NaN
    rounded = screened & (top >= SMALLEST_MAXIMUM)
    unit = tl.where(rounded, top, 1.0)
    inverse = 1.0 / unit
    squares = nothing
    errors = nothing
    high_row = codes_ptr + code_row(b, 0).to(tl.int64) * D
    low_row = codes_ptr + code_row(b, 1).to(tl.int64) * D
    for d in range(0, D, CHUNK):
        there = d + cols < D
        h = tl.load(row + d + cols, mask=there, other=0.0).to(tl.float32)
        x = tl.where(rounded, h, 0.0) * inverse
        # Any integer near enough would do: the error is measured, not assumed.
        code = tl.floor(x * LARGEST_STEPS + 0.5)
        high = tl.floor((code + 128.0) * (1.0 / 256.0))
        error = x - code * (1.0 / LARGEST_STEPS)
        squares += x * x
        errors += error * error
        tl.store(high_row + d + cols, high.to(tl.int8), mask=there)
        tl.store(low_row + d + cols, (code - 256.0 * high).to(tl.int8), mask=there)
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


@triton.jit
def round_claimed_rows(hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, cols, B, D,
                       gamma, norm_inflation, root, NVIDIA: tl.constexpr):  # fmt: skip
    """Round the rows that this program gets hold of; cols as in _round_row."""
    b = tl.atomic_add(counters_ptr + CLAIMED, 1, sem="relaxed")
    while b < B:
        _round_row(
            hidden_ptr, codes_ptr, numbers_ptr, cols, b, B, D, gamma, norm_inflation, root
        )  # fmt: skip
        tl.store(found_ptr + b, 0)
        _fence_for_tma(b, NVIDIA)
        tl.debug_barrier()
        tl.atomic_add(counters_ptr + ROUNDED, 1, sem="release")
        b = tl.atomic_add(counters_ptr + CLAIMED, 1, sem="relaxed")


@triton.jit
def wait_for_rows(counters_ptr, B, NVIDIA: tl.constexpr):
    """Until all rows are rounded, by programs that run."""
    rounded = tl.atomic_add(counters_ptr + ROUNDED, 0, sem="acquire")
    while rounded < B:
        rounded = tl.atomic_add(counters_ptr + ROUNDED, 0, sem="acquire")
    _fence_for_tma(rounded, NVIDIA)


@triton.jit
def _fence_for_tma(x, NVIDIA: tl.constexpr):
    """TMA reads what was written before; x is any int32 scalar."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [x], tl.int32, False, 1
        )


@triton.jit
def _prefetch(copy_ptr, v0, V, D, BLOCK_V: tl.constexpr, KIB: tl.constexpr):
    """Ask for the first columns of a tile of the copy."""
    line = tl.arange(0, 8 * KIB)  # of 128 bytes
    row = tl.minimum(v0 + line % BLOCK_V, V - 1)
    prefetch(copy_ptr + row.to(tl.int64) * D + (first_column(v0, D) + line // BLOCK_V * 128) % D)


@triton.jit
def prefetch(at):
    """Bring the lines at pointers `at` into the L2; nothing waits for them. NVIDIA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def _screened_logits(codes, copy, pid_b, v0, V, D, BLOCK_B: tl.constexpr,
                     BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, V_ON_M: tl.constexpr,
                     USE_TMA: tl.constexpr):  # fmt: skip
    """256 code . high + code . low, fp32 [BLOCK_B, BLOCK_V]: the integer sums are exact."""
    ROWS: tl.constexpr = 2 * BLOCK_B
    acc = tl.zeros((BLOCK_V, ROWS) if V_ON_M else (ROWS, BLOCK_V), tl.int32)
    steps = tl.cdiv(D, BLOCK_D)
    # As in the fused kernels, programs begin at different columns (_mainloop.tile_logits).
    first = first_column(v0, D) // BLOCK_D
    b0 = pid_b * ROWS
    for step in range(steps):
        d0 = (first + step) % steps * BLOCK_D
        w = _load_tile(copy, v0, d0, BLOCK_V, BLOCK_D, V, D, USE_TMA)
        h = _load_tile(codes, b0, d0, ROWS, BLOCK_D, b0 + ROWS, D, USE_TMA)
        if V_ON_M:
            acc = tl.dot(w, h.T, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(h, w.T, acc, out_dtype=tl.int32)
    return both_bytes(acc.T if V_ON_M else acc)


@triton.jit
def both_bytes(sums):
    """int32 [2 R, W], of high and low bytes as in code_row -> 256 high + low, fp32 [R, W]."""
    R: tl.constexpr = sums.shape[0] // 2
    W: tl.constexpr = sums.shape[1]
    high, low = sums.reshape(R // 8, 2, 8, W).permute(0, 2, 3, 1).split()
    both = high.to(tl.float32) * 256.0 + low.to(tl.float32)
    return both.reshape(R, W)


@triton.jit
def rough_gumbel(bits, NVIDIA: tl.constexpr):
    """32 random bits (uint32) -> Gumbel(0, 1) in fp32, within 2^-10 of _helper.gumbel.

    -log E, E = -log(1 - u), u = (bits + 0.5) 2^-32. For 1 - u above 1 - 2^-10, E is taken for u.
    """
    others = (bits.to(tl.int32, bitcast=True) ^ -1).to(tl.uint32, bitcast=True)
    rest = others.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 1 - u
    u = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    E = tl.where(rest > 0.9990234375, u, _rough_log2(rest, NVIDIA) * -LN_2)
    return _rough_log2(E, NVIDIA) * -LN_2


@triton.jit
def _rough_log2(x, NVIDIA: tl.constexpr):
    """log2 of a normal number: within 2^-22 if x is between 0.5 and 2, else of its own size."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1
        )
    else:
        return tl.log2(x)


@triton.jit
def _ends(z, tokens, scale_ptr, residual_ptr, norm_ptr, bias_ptr, row_biases, rows, B, V, extra,
          reach, spread, soft_cap, temperature, noise):  # fmt: skip
    """(lower, upper) of scores y + T g, as _screen.score_bounds.

    NaN stands for a score without a bound, so that comparisons let it pass. Where a bias of -inf
    forbids a token both are -inf, unless its logit may be undefined.

    Args:
        z, noise: [R, W]; z is still to be multiplied by the tokens' scales. tokens: int32 [1, W].
        row_biases: pointers to bias[rows, 0], [R, 1], or None.
        extra, reach, spread, temperature: [R, 1].
    """
    inside = tokens < V
    y = z * tl.load(scale_ptr + tokens, mask=inside, other=1.0)
    residual = tl.load(residual_ptr + tokens, mask=inside, other=0.0)
    norm = tl.load(norm_ptr + tokens, mask=inside, other=0.0)
    bound = residual * reach + (norm * spread + extra)
    if soft_cap is not None:
        y = capped(y, soft_cap)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + tokens, mask=inside, other=float("-inf")).to(tl.float32)
        y += bias
        bound += tl.where(tl.abs(bias) < float("inf"), tl.abs(bias) * BIAS_SLACK, 0.0)
    if row_biases is not None:
        there = (rows < B)[:, None] & inside
        bias = tl.load(row_biases + tokens, mask=there, other=float("-inf")).to(tl.float32)
        y += bias
        bound += tl.where(tl.abs(bias) < float("inf"), tl.abs(bias) * BIAS_SLACK, 0.0)
    if soft_cap is not None:
        y = tl.where(inside, y, float("-inf"))  # the cap of the -inf there is a number
    score = y + temperature * noise
    return score - bound, score + bound


@triton.jit
def settings(seed_ptr, offset_ptr, temperature, rows, B, SEED_PER_ROW: tl.constexpr,
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
def _leave(z, words, v0, vectors, rows, row, seed, offset, T, extra, reach, spread, soft_cap,
           row_bias_ptr, limit, count, mine, B, V, NOISE: tl.constexpr, ROOM: tl.constexpr,
           NVIDIA: tl.constexpr):  # fmt: skip
    """Leave records of the words of a tile [R, WIDTH] that may win.

    Word after word of every slot [R, W], W words side by side. A slot has a bound, a number and
    room for records of its own, so threads do not have to agree on anything.

    Args:
        vectors: pointers (scale, residual, norm, bias or None).
        mine: int32 [R, W] pointers to the slots' records: (upper bound, word and lanes), one after
            the other.
        limit, count: [R, W]: the largest lower bound that the slot knows of, and the number of its
            records.

    Returns:
        (limit, count).
    """
    R: tl.constexpr = z.shape[0]
    WIDTH: tl.constexpr = z.shape[1]
    WORDS: tl.constexpr = count.shape[1]
    if WIDTH > 4 * WORDS:
        low, high = halves(z)
        words_low = None
        words_high = None
        if words is not None:
            words_low, words_high = halves(words)
        limit, count = _leave(
            low, words_low, v0, vectors, rows, row, seed, offset, T, extra, reach, spread, soft_cap,
            row_bias_ptr, limit, count, mine, B, V, NOISE, ROOM, NVIDIA,
        )  # fmt: skip
        return _leave(
            high, words_high, v0 + WIDTH // 2, vectors, rows, row, seed, offset, T, extra, reach,
            spread, soft_cap, row_bias_ptr, limit, count, mine, B, V, NOISE, ROOM, NVIDIA,
        )  # fmt: skip
    else:
        scale_ptr, residual_ptr, norm_ptr, bias_ptr = vectors
        word = tl.arange(0, WORDS)
        first = (v0 + (word >> 2) * 16 + (word & 3) * 2)[None, :]
        z0, z1, z2, z3 = split_words(z)
        row_biases = None
        if row_bias_ptr is not None:
            row_biases = row_bias_ptr + rows.to(tl.int64)[:, None] * V
        allowed = tl.where((rows < B)[:, None], 15, 0)
        if words is not None:
            m0, m1, m2, m3 = split_words(masked(tl.zeros((R, WIDTH), tl.float32), words))
            allowed &= _bits(m0 == 0.0, m1 == 0.0, m2 == 0.0, m3 == 0.0)
        g0 = 0.0
        g1 = 0.0
        g2 = 0.0
        g3 = 0.0
        if NOISE == "token":
            # Always 0; ties the noise to the layout of z, and makes a word wait for the one
            # before, as in _helper.candidates. A bound is never NaN.
            zero = ((z0 < float("-inf")) | (limit != limit)).to(tl.int32)
            r0, r1, r2, r3 = random_words(v0, word, row, seed, offset, 0, zero)
            g0 = rough_gumbel(r0, NVIDIA)
            g1 = rough_gumbel(r1, NVIDIA)
            g2 = rough_gumbel(r2, NVIDIA)
            g3 = rough_gumbel(r3, NVIDIA)
        l0, u0 = _ends(
            z0, first, scale_ptr, residual_ptr, norm_ptr, bias_ptr, row_biases, rows, B, V,
            extra, reach, spread, soft_cap, T, g0,
        )  # fmt: skip
        l1, u1 = _ends(
            z1, first + 1, scale_ptr, residual_ptr, norm_ptr, bias_ptr, row_biases, rows, B, V,
            extra, reach, spread, soft_cap, T, g1,
        )  # fmt: skip
        l2, u2 = _ends(
            z2, first + 8, scale_ptr, residual_ptr, norm_ptr, bias_ptr, row_biases, rows, B, V,
            extra, reach, spread, soft_cap, T, g2,
        )  # fmt: skip
        l3, u3 = _ends(
            z3, first + 9, scale_ptr, residual_ptr, norm_ptr, bias_ptr, row_biases, rows, B, V,
            extra, reach, spread, soft_cap, T, g3,
        )  # fmt: skip
        if words is not None:
            l0 = tl.where((allowed & 1) != 0, l0, float("-inf"))
            l1 = tl.where((allowed & 2) != 0, l1, float("-inf"))
            l2 = tl.where((allowed & 4) != 0, l2, float("-inf"))
            l3 = tl.where((allowed & 8) != 0, l3, float("-inf"))
        limit = larger(limit, larger(larger(l0, l1), larger(l2, l3)))
        lanes = allowed & reaching(u0, u1, u2, u3, limit)
        upper = nan_max(nan_max(u0, u1), nan_max(u2, u3))
        record = (((v0 >> 4) * 4 + word)[None, :] << 4) | lanes
        fits = (lanes != 0) & (count < ROOM)
        store_record(mine + 2 * count, upper, record, fits, NVIDIA)
        count += (lanes != 0).to(tl.int32)
        return limit, count


@triton.jit
def larger(a, b):
    """The larger of two, or the one that is a number."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.NONE)


@triton.jit
def reaching(u0, u1, u2, u3, least):
    """Bit i is set where u_i is not below least."""
    return _bits((u0 < least) == 0, (u1 < least) == 0, (u2 < least) == 0, (u3 < least) == 0)


@triton.jit
def _bits(b0, b1, b2, b3):
    low = b0.to(tl.int32) | (b1.to(tl.int32) << 1)
    return low | (b2.to(tl.int32) << 2) | (b3.to(tl.int32) << 3)


@triton.jit
def store_record(at, upper, record, there, NVIDIA: tl.constexpr):
    """Both words of a record at `at`, where `there`."""
    if NVIDIA:
        # tl.store would first move everything to another layout, by shared memory and barriers.
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.s32 p, $4, 0;
            @p st.global.v2.b32 [$1], {$2, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [at.to(tl.int64), upper.to(tl.int32, bitcast=True), record, there.to(tl.int32)],
            tl.int32,
            False,
            1,
        )
    else:
        tl.store(at, upper.to(tl.int32, bitcast=True), mask=there)
        tl.store(at + 1, record, mask=there)


@triton.jit
def touch(at, NVIDIA: tl.constexpr):
    """Bring what pointers `at` point to into the nearest cache; nothing waits for it."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "ld.global.ca.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
        )


@triton.jit(do_not_specialize=["B", "V"])
def screen_kernel(
    hidden_ptr,  # [B, D]
    codes_ptr,  # [blocks of rows * 2 * BLOCK_B, D] int8, scratch; see code_row
    codes,  # the same, descriptor (USE_TMA) or pointer
    copy_ptr,  # [V, D] int8
    copy,  # the same, descriptor (USE_TMA) or pointer
    scale_ptr,  # [V] fp32
    residual_ptr,  # [V] fp32
    norm_ptr,  # [V] fp32
    numbers_ptr,  # [ROW_NUMBERS, B] fp32, scratch
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or None
    row_bias_ptr,  # [B, V] or None
    mask_ptr,  # [B, mask_words] int32, or None
    counters_ptr,  # CLAIMED, ROUNDED; 0 at first, put back to it by the second launch
    lower_ptr,  # [B] int64, bound_key of the largest lower bound so far; at rest at first
    listed_ptr,  # [B] int32: tokens on each list, above LIST if not all fit; 0 at first
    records_ptr,  # [programs per block of rows, B, SLICE / 4, ROOM, 2] int32, scratch
    list_ptr,  # [2, B, LIST] int32, out: upper bounds of their words; tokens
    found_ptr,  # [B] int32, out: 0
    B,
    V,
    D,
    gamma,  # accumulation_error(D)
    norm_inflation,  # 1 + (D + 4) 2^-24
    root,  # sqrt(D)
    mask_words,
    NOISE: tl.constexpr,  # "token" or "none" (greedy)
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    ROOM: tl.constexpr,
    LIST: tl.constexpr,
    DEPTH: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,  # KiB of the copy that a program asks for before hidden is rounded
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    EARLY: tl.constexpr,  # the second launch may begin, and wait
    NVIDIA: tl.constexpr,  # else plain Triton: the interpreter
):
    if EARLY:
        gdc_launch_dependents()
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    if USE_TMA and NVIDIA:
        _prefetch(copy_ptr, pid_v * BLOCK_V, V, D, BLOCK_V, AHEAD)
    round_claimed_rows(
        hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, tl.arange(0, CHUNK), B, D,
        gamma, norm_inflation, root, NVIDIA,
    )  # fmt: skip
    wait_for_rows(counters_ptr, B, NVIDIA)
    rows = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    idle = rows >= B
    seed, row, offset, T, _ = settings(
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

    # A slot has every SLOTS-th word of a row.
    SLOTS: tl.constexpr = SLICE // 4
    count = tl.zeros((BLOCK_B, SLOTS), tl.int32)
    limit = tl.full((BLOCK_B, SLOTS), LOWEST_BOUND, tl.float32)
    slot = tl.arange(0, SLOTS)[None, :]
    mine = records_ptr + ((pid_v * B + rows).to(tl.int64)[:, None] * SLOTS + slot) * (2 * ROOM)
    vectors = (scale_ptr, residual_ptr, norm_ptr, bias_ptr)
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        line = tl.minimum(v0 + tl.arange(0, BLOCK_V // 8) * 8, V - 1)
        touch(scale_ptr + line, NVIDIA)
        touch(residual_ptr + line, NVIDIA)
        touch(norm_ptr + line, NVIDIA)
        # Other programs raise it meanwhile; an older one only leaves over more.
        key = tl.load(lower_ptr + rows, mask=~idle, other=0, volatile=True)
        z = _screened_logits(
            codes, copy, pid_b, v0, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        limit = tl.maximum(limit, bound_of_key(key)[:, None])
        z *= step
        if v0 + BLOCK_V > V:
            z = tl.where((v0 + tl.arange(0, BLOCK_V) < V)[None, :], z, float("-inf"))
        limit, count = _leave(
            z, words, v0, vectors, rows, row, seed, offset, T, extra, reach, spread, soft_cap,
            row_bias_ptr, limit, count, mine, B, V, NOISE, ROOM, NVIDIA,
        )  # fmt: skip
        best = tl.max(limit, axis=1)
        there = (~idle) & (best > LOWEST_BOUND)
        tl.atomic_max(lower_ptr + rows, bound_key(best), mask=there, sem="relaxed")

    tl.debug_barrier()
    records = records_ptr + (pid_v * B + rows).to(tl.int64) * (SLOTS * 2 * ROOM)
    _list_what_is_left(
        rows, ~idle, count, records, lower_ptr, listed_ptr, list_ptr, B, ROOM, LIST, DEPTH
    )


@triton.jit
def _list_what_is_left(rows, there, count, records, lower_ptr, listed_ptr, list_ptr, B,
                       ROOM: tl.constexpr, LIST: tl.constexpr,
                       DEPTH: tl.constexpr):  # fmt: skip
    """Move those of this program's records that still reach the bound to the lists of the rows.

    DEPTH records of every slot at a time.

    Args:
        rows, there, records: [R]; records points to those of the row. count: [R, slots].
    """
    R: tl.constexpr = count.shape[0]
    SLOTS: tl.constexpr = count.shape[1]
    lower = tl.load(lower_ptr + rows, mask=there, other=0, volatile=True)
    limit = bound_of_key(lower)[:, None]
    out = list_ptr + rows.to(tl.int64)[:, None] * LIST
    most = tl.max(count, axis=1)
    # More records than there was room for: the row is computed in full.
    tl.atomic_add(listed_ptr + rows, LIST + 1, mask=there & (most > ROOM), sem="relaxed")
    place = tl.arange(0, SLOTS * DEPTH)[None, :]
    filled = tl.broadcast_to(count[:, :, None], (R, SLOTS, DEPTH)).reshape(R, SLOTS * DEPTH)
    for first in range(0, tl.minimum(tl.max(most, axis=0), ROOM), DEPTH):
        i = first + place % DEPTH
        at = records[:, None] + 2 * (place // DEPTH * ROOM + i)
        known = there[:, None] & (i < tl.minimum(filled, ROOM))
        upper = tl.load(at, mask=known, other=0)
        record = tl.load(at + 1, mask=known, other=0)
        below = upper.to(tl.float32, bitcast=True) < limit
        lanes = tl.where(known & (below == 0), record & 15, 0)
        tokens = (lanes & 1) + ((lanes >> 1) & 1) + ((lanes >> 2) & 1) + (lanes >> 3)
        number = tl.sum(tokens, axis=1)
        before = tl.atomic_add(listed_ptr + rows, number, mask=there & (number > 0), sem="relaxed")
        to = before[:, None] + tl.cumsum(tokens, axis=1) - tokens
        word = record >> 4
        token = (word >> 2) * 16 + (word & 3) * 2
        for lane in tl.static_range(4):
            fits = (((lanes >> lane) & 1) != 0) & (to < LIST)
            tl.store(out + to, upper, mask=fits)
            tl.store(out + to + B.to(tl.int64) * LIST,
                     token + (lane & 1) + (lane >> 1) * 8, mask=fits)  # fmt: skip
            to += (lanes >> lane) & 1
