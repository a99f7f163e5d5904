"""Device code of the screened sampler's first launch: round hidden to two bytes, and screen.

The programs first round hidden to 16 bits, row by row, while the first bytes of the int8 copy are
loaded (screened.rounding). Then they stream the copy, share the largest lower bound of each row,
and record the tokens that may exceed it, in Philox words of four tokens, per program and row
(screened.records). When a program ends, the bound has risen. The few tokens that still reach it are
put on the list of the row for the second launch (screened.resolve). Ranks raise each other's bounds
(screened.lower_bounds).
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import allowed_words
from fsbench.kernels.device.mainloop import (
    first_column,
    load_tile,
    own_tokens,
    prefetch,
    program_share,
    touch,
)
from fsbench.kernels.device.rows import settings
from fsbench.kernels.screened.lower_bounds import (
    bound_of_word,
    local_bounds,
    raise_bounds,
    steps_of_rows,
)
from fsbench.kernels.screened.records import leave_records, list_remaining
from fsbench.kernels.screened.rounding import both_bytes, round_claimed_rows, wait_for_rows
from fsbench.kernels.screened.score_bounds import (
    ABSOLUTE_SLACK,
    CAP_SLACK,
    LARGEST_TEMPERATURE,
    LOWEST_BOUND,
    ROUGH_SLACK,
)


@triton.jit(do_not_specialize=["B", "V", "num_tokens", "rank"])
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
    lower_ptr,  # [B] int64, words of screened.lower_bounds; LOWEST_KEY at first
    listed_ptr,  # [B] int32: tokens on each list, above LIST if not all fit; 0 at first
    records_ptr,  # [programs per block of rows, B, slots, ROOM, 2] int32, scratch
    list_ptr,  # [2, B, LIST] int32, out: upper bounds of their words; (first) tokens
    found_ptr,  # [B] int32, out: 0
    B,
    V,
    D,
    gamma,  # accumulation_error(D)
    norm_inflation,  # 1 + (D + 4) 2^-24
    root,  # sqrt(D)
    mask_words,
    first_token,  # of this rank's rows, a multiple of 256; V is of all ranks. None: no shard
    num_tokens,  # of this rank, or None
    buffers_ptr,  # this and what follows: as shard.exchange; None without other ranks
    counts_ptr,
    rank,
    area,
    NOISE: tl.constexpr,  # "token", or "none" (greedy)
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    RANKS: tl.constexpr,
    ROOM: tl.constexpr,
    LIST: tl.constexpr,
    DEPTH: tl.constexpr,
    ROUNDED_AT_ONCE: tl.constexpr,  # columns of hidden that are rounded at a time
    AHEAD: tl.constexpr,  # KiB of the copy that a program asks for before hidden is rounded
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    UNIT: tl.constexpr,  # gcd(D, 16); Triton itself knows only multiples of 16
    NVIDIA: tl.constexpr,  # else plain Triton: the interpreter
    FENCED: tl.constexpr,  # see screened.rounding
):
    if UNIT < 16:
        D = D // UNIT * UNIT
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    first, shard_size = own_tokens(first_token, num_tokens, V)
    if first_token is not None:  # index by token id
        scale_ptr -= first_token
        residual_ptr -= first_token
        norm_ptr -= first_token
    if USE_TMA and NVIDIA:
        prefetch_tile(copy_ptr, pid_v * BLOCK_V, shard_size, D, BLOCK_V, AHEAD)
    cols = tl.arange(0, ROUNDED_AT_ONCE)
    round_claimed_rows(
        hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, cols, B, D, gamma,
        norm_inflation, root, FENCED,
    )  # fmt: skip
    wait_for_rows(counters_ptr, B, FENCED)
    rows = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    idle = rows >= B
    seed, row, offset, T, inverse_temperature = settings(
        seed_ptr, offset_ptr, temperature, rows, B, SEED_PER_ROW, OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )  # fmt: skip
    step = tl.load(numbers_ptr + rows, mask=~idle, other=0.0)[:, None]
    reach = tl.load(numbers_ptr + B + rows, mask=~idle, other=0.0)[:, None]
    spread = tl.load(numbers_ptr + 2 * B + rows, mask=~idle, other=0.0)[:, None]
    sane = T <= LARGEST_TEMPERATURE  # False for NaN
    extra = tl.where(sane, T * ROUGH_SLACK + 2 * ABSOLUTE_SLACK, float("inf"))
    T = tl.where(sane, T, 0.0)
    if soft_cap is not None:
        extra += soft_cap * CAP_SLACK

    # What is absent is an empty tuple, as None cannot be in one.
    line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
    lower_ptr = local_bounds(lower_ptr, line)
    steps = steps_of_rows(rows, ~idle, line)
    # A slot has every SLOTS-th word of a row.
    SLOTS: tl.constexpr = SLICE // 4
    count = tl.zeros((BLOCK_B, SLOTS), tl.int32)
    limit = tl.full((BLOCK_B, SLOTS), LOWEST_BOUND, tl.float32)
    slot = tl.arange(0, SLOTS)[None, :]
    slots = records_ptr + ((pid_v * B + rows).to(tl.int64)[:, None] * SLOTS + slot) * (2 * ROOM)
    vectors = (scale_ptr, residual_ptr, norm_ptr, () if bias_ptr is None else (bias_ptr,))
    for tile_v in tl.range(pid_v, tl.cdiv(shard_size, BLOCK_V), programs_v, flatten=FLATTEN):
        row0 = tile_v * BLOCK_V
        v0 = first + row0
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        ahead = tl.minimum(v0 + tl.arange(0, BLOCK_V // 8) * 8, V - 1)
        touch(scale_ptr + ahead, NVIDIA)
        touch(residual_ptr + ahead, NVIDIA)
        touch(norm_ptr + ahead, NVIDIA)
        # Other programs raise the bound meanwhile; an older bound only records more tokens.
        word = tl.load(lower_ptr + rows, mask=~idle, other=0, volatile=True)
        z = screened_logits(
            codes, copy, pid_b, row0, shard_size, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        limit = tl.maximum(limit, bound_of_word(word, steps)[:, None])
        z *= step
        if v0 + BLOCK_V > V:
            z = tl.where((v0 + tl.arange(0, BLOCK_V) < V)[None, :], z, float("-inf"))
        limit, count = leave_records(
            z, words, v0, vectors, rows, (row, seed, offset),
            (T, inverse_temperature, extra, reach, spread), soft_cap, row_bias_ptr, limit, count,
            slots, B, V, NOISE, ROOM, NVIDIA,
        )  # fmt: skip
        raise_bounds(lower_ptr, rows, tl.max(limit, axis=1), ~idle, steps, line, RANKS)

    tl.debug_barrier()
    records = records_ptr + (pid_v * B + rows).to(tl.int64) * (SLOTS * 2 * ROOM)
    list_remaining(
        rows, ~idle, count, records, lower_ptr, steps, listed_ptr, list_ptr, B, V, ROOM, LIST,
        DEPTH,
    )  # fmt: skip


@triton.jit
def screened_logits(codes, copy, pid_b, v0, V, D, BLOCK_B: tl.constexpr,
                     BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, V_ON_M: tl.constexpr,
                     USE_TMA: tl.constexpr):  # fmt: skip
    """Return 256 code . high + code . low, fp32 [BLOCK_B, BLOCK_V]; the integer sums are exact."""
    ROWS: tl.constexpr = 2 * BLOCK_B
    acc = tl.zeros((BLOCK_V, ROWS) if V_ON_M else (ROWS, BLOCK_V), tl.int32)
    steps = tl.cdiv(D, BLOCK_D)
    # As in the fused kernels, programs begin at different columns (device.mainloop.tile_logits).
    first = first_column(v0, D) // BLOCK_D
    b0 = pid_b * ROWS
    for step in range(steps):
        d0 = (first + step) % steps * BLOCK_D
        w = load_tile(copy, v0, d0, BLOCK_V, BLOCK_D, V, D, USE_TMA)
        h = load_tile(codes, b0, d0, ROWS, BLOCK_D, b0 + ROWS, D, USE_TMA)
        if V_ON_M:
            acc = tl.dot(w, h.T, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(h, w.T, acc, out_dtype=tl.int32)
    return both_bytes(acc.T if V_ON_M else acc)


@triton.jit
def prefetch_tile(copy_ptr, v0, V, D, BLOCK_V: tl.constexpr, KIB: tl.constexpr):
    """Prefetch the first columns of a tile of the copy."""
    line = tl.arange(0, 8 * KIB)  # of 128 bytes
    row = tl.minimum(v0 + line % BLOCK_V, V - 1)
    prefetch(copy_ptr + row.to(tl.int64) * D + (first_column(v0, D) + line // BLOCK_V * 128) % D)
