"""Device code of truncated sampling: the matmul that stores logits, and the first look at them.

`truncated_matmul_kernel` stores each fp32 logit once, and beside it the largest of every run of 32
tokens. `sampling_look_kernel`, one program per row, finds out with these maxima which runs can
hold a token that is kept:

    top-k   the kth largest of all maxima is at most the kth largest logit
    min-p   the threshold is known from the largest logit alone

If the logits of these runs fit into registers, it searches the cutoff among them, lets the kept
tokens race, and the row is done. If not, it leaves a plan, and the kernels of _row_kernels.py do
the row with many programs.
"""

import triton
import triton.language as tl

from fsbench.kernels._cutoff import (
    LOWEST,
    cut_in_registers,
    cut_of_row,
    first_key,
    of_row,
    ordered,
    packed_weights,
    reached_by,
    value_of,
)
from fsbench.kernels._epilogue import allowed_words, shared_bias
from fsbench.kernels._helper import (
    LOG2_E,
    _log,
    nan_max,
    ordered_key,
    temperatures,
    token_of_key,
)
from fsbench.kernels._kept_race import load_runs, race
from fsbench.kernels._mainloop import program_share, tile_logits
from fsbench.kernels._row_plan import (
    BY_COUNT,
    BY_MASS,
    DONE,
    GATHER,
    PLAN,
    RACE,
    store_plan,
)
from fsbench.kernels._stored_logits import RUN, store_with_largest

GATHERED_K = tl.constexpr(2048)
"""Up to this k what reaches the kth largest maximum is gathered at once."""

SAMPLED_RUNS = tl.constexpr(64)
"""Runs whose smallest logit says how far down the first search should look."""

SCANNED = tl.constexpr(1024)
"""Tokens that one program takes at once of a row that it reads alone."""


@triton.jit(do_not_specialize=["B", "V", "mask_words", "runs"])
def truncated_matmul_kernel(
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


@triton.jit(do_not_specialize=["top_k", "V", "runs", "capacity"])
def sampling_look_kernel(
    logits_ptr,  # [B, V] fp32; penalties are written back
    largest_ptr,  # [B, runs] fp32; likewise
    found_ptr,  # [B, runs] int32, scratch
    plan_ptr,  # [B, PLAN] int64, out (_row_plan.py); or None: every row is done here
    numbers_ptr,  # [B, NUMBERS] fp32, out; or None
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
    CHUNK: tl.constexpr,  # runs whose logits are in registers at once, up to 128
):
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * V
    largest_ptr += row.to(tl.int64) * runs
    found_ptr += row.to(tl.int64) * runs
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
    sharpness = inverse_temperature * LOG2_E
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
    above_all = ordered(top) + 1
    low = tl.full((), LOWEST, tl.int32)
    if sampled & (least > 0.0):
        threshold = top + T * _log(tl.minimum(tl.maximum(least, 1e-37), 1.0))
        low = tl.maximum(low, ordered(threshold))
    if k < runs:
        low = tl.maximum(low, reached_by(order, k, above_all))
    among = order >= low
    n = tl.sum(among.to(tl.int32))
    if plan_ptr is None:
        _draw_here(
            logits_ptr, found_ptr, tokens_ptr + row, valid_ptr + row, kept_ptr + row, among, low,
            above_all, k, p, by_p, valid, top, sharpness, T, seed, offset, counted_row, V, CHUNK,
            True,
        )  # fmt: skip
    elif n > CHUNK:
        mode = tl.where(by_p, BY_MASS, RACE)
        few = (k < runs) & (k <= GATHERED_K)
        mode = tl.where(k < V, tl.where(few, GATHER, BY_COUNT), mode)
        start = tl.maximum(value_of(low), _smallest_of_sample(logits_ptr, top, runs, V))
        if mode == BY_MASS:
            # What is below has less than half of the mass that top-p gives up.
            span = _log(1.0 - p) - _log(2.0 * V.to(tl.float32))
            start = tl.maximum(start, top + T * span)
        store_plan(plan_ptr, numbers_ptr, row, mode, low, above_all, k, top, start, sharpness,
                   tl.where(by_p, p, 2.0), T)  # fmt: skip
        tl.store(kept_ptr + row, 0)
    else:
        _draw_here(
            logits_ptr, found_ptr, tokens_ptr + row, valid_ptr + row, kept_ptr + row, among, low,
            above_all, k, p, by_p, valid, top, sharpness, T, seed, offset, counted_row, V, CHUNK,
            False,
        )  # fmt: skip
        tl.store(plan_ptr + row * PLAN, DONE)


@triton.jit
def _draw_here(logits_ptr, found_ptr, token_ptr, valid_ptr, kept_ptr, among, low, above_all, k, p,
               by_p, valid, top, sharpness, T, seed, offset, row, V, CHUNK: tl.constexpr,
               ALONE: tl.constexpr):  # fmt: skip
    """Draw a row's token from the runs in `among`; with ALONE they may be more than a chunk."""
    BLOCK_RUNS: tl.constexpr = among.shape[0]
    number = tl.cumsum(among.to(tl.int32), axis=0)
    n = tl.sum(among.to(tl.int32))
    tl.store(found_ptr + number - 1, tl.arange(0, BLOCK_RUNS), mask=among)
    tl.debug_barrier()
    y, first = load_runs(logits_ptr, found_ptr, 0, n, V, CHUNK)
    flat = y.reshape(CHUNK * RUN)
    token = (first + tl.arange(0, RUN)[None, :]).reshape(CHUNK * RUN)
    keys = ordered_key(flat, token)
    weights = packed_weights(flat, ordered(flat) >= low, top, sharpness)
    cut = first_key(low)
    high = first_key(above_all)
    if ALONE:
        if n > CHUNK:
            cut = cut_of_row(logits_ptr, V, cut, high, k, p, by_p, top, sharpness, SCANNED)
        else:
            cut = cut_in_registers(keys, weights, cut, high, k, p, by_p)
    else:
        cut = cut_in_registers(keys, weights, cut, high, k, p, by_p)
    best, kept = race(y, first, cut, T, seed, offset, row)
    if ALONE:
        for chunk in tl.range(1, tl.cdiv(n, CHUNK)):
            y, first = load_runs(logits_ptr, found_ptr, chunk, n, V, CHUNK)
            more, many = race(y, first, cut, T, seed, offset, row)
            best = tl.maximum(best, more)
            kept += many
    kept = tl.sum(tl.sum(kept, axis=1), axis=0)
    winner = tl.where(valid, token_of_key(tl.max(tl.max(best, axis=1), axis=0)), -1)
    tl.store(token_ptr, winner.to(tl.int64))
    tl.store(valid_ptr, winner >= 0)
    tl.store(kept_ptr, tl.where(winner >= 0, kept, 0))


@triton.jit
def _smallest_of_sample(logits_ptr, top, runs, V):
    """The smallest finite logit of some runs spread over the row, at most `top`."""
    run = (tl.arange(0, SAMPLED_RUNS).to(tl.int64) * runs // SAMPLED_RUNS).to(tl.int32)
    token = (run * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf"))
    return tl.min(tl.min(tl.where(y > float("-inf"), y, top), axis=1), axis=0)


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
