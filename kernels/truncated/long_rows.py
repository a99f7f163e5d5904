"""Device code: the cutoff and the race of rows that need many programs.

These launches follow those of truncated.search. Programs share a row's blocks of 2048 tokens, and
the last program to arrive decides:

    sampling_cutoff_kernel
        gathers the tokens of the interval that the search found, and finds the cutoff among them.
        If the gathered tokens are all that can be kept, it also draws, and the row is done. A row
        that is TESTED has a race
    sampling_race_kernel
        the kept tokens race, unless the draw from the whole vocabulary is kept. A row that is
        TESTED has its last test, after which one program continues until a token is kept
"""

import triton
import triton.language as tl

from fsbench.kernels.device.rows import noise_of_rows
from fsbench.kernels.device.stored_logits import place_of_largest
from fsbench.kernels.noise.contract import split_words
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered, ordered_key, token_of_key
from fsbench.kernels.truncated.cutoff import (
    GATHERED,
    MASS_UNITS,
    NOTHING,
    WAYS,
    cut_among,
    cut_by_scans,
    first_key,
    load_keys,
    packed_weights,
    sums_of_row,
    unpacked,
)
from fsbench.kernels.truncated.race import RUN, draw_of_few, load_runs, race
from fsbench.kernels.truncated.row_plan import (
    ABOVE,
    BEST,
    BY_MASS,
    CUT,
    DONE,
    DRAWN,
    FEW,
    GATHER,
    HIGH,
    LOW,
    MODE,
    NUMBERS,
    PLAN,
    RACE,
    SHARPNESS,
    TAKEN,
    TARGET,
    TEMPERATURE,
    TESTED,
    TOP,
    K,
    P,
    assigned,
    last_to_arrive,
    modes_of_rows,
    set_mode,
    wait_for_launch,
)
from fsbench.kernels.truncated.search import test_planned
from fsbench.kernels.truncated.top_p import BLOCK

SOUGHT = tl.constexpr(4096)
"""Tokens that are looked through at once for those to gather."""

ROW_AT_ONCE = tl.constexpr(512)
"""Tokens that one program takes at once of a row that it reads alone."""


@triton.jit(do_not_specialize=["launch", "B", "blocks"])
def sampling_cutoff_kernel(
    logits_ptr,  # [B, stride] fp32
    plan_ptr,  # [B, PLAN] int64
    numbers_ptr,  # [B, NUMBERS] fp32
    gathered_ptr,  # [B, GATHERED] int64, scratch: keys
    tops_ptr,  # [B, blocks] fp32, scratch of test_or_race; or None: no row is TESTED
    masses_ptr,  # [B, blocks, 2] int64, scratch of test_or_race, or None
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    cuts_ptr,  # [B] int64, out: keys; or None
    launch,  # its number among those over rows (truncated.row_plan)
    B,
    stride,
    blocks,
    ROWS: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    USE_PDL: tl.constexpr,  # programmatic dependent launch
):
    if USE_PDL:
        wait_for_launch()
    modes = modes_of_rows(plan_ptr, launch, B, ROWS)
    row, share, programs = assigned((modes != DONE) & (modes != RACE))
    if programs > 0:
        plan_ptr += row * PLAN
        numbers_ptr += row * NUMBERS
        logits_ptr += row.to(tl.int64) * stride
        gathered_ptr += row.to(tl.int64) * GATHERED
        mode = tl.load(plan_ptr + MODE + launch)
        if mode != TESTED:
            _gather_and_cut(
                logits_ptr, plan_ptr, numbers_ptr, gathered_ptr, seed_ptr, offset_ptr, tokens_ptr,
                valid_ptr, cuts_ptr, row, mode, launch, share, programs, stride, SEED_PER_ROW,
                OFFSET_PER_ROW,
            )  # fmt: skip
        elif tops_ptr is not None:
            test_planned(
                logits_ptr, plan_ptr, numbers_ptr, tops_ptr + row * blocks,
                masses_ptr + row * blocks * 2, seed_ptr, offset_ptr, tokens_ptr, valid_ptr,
                row, share, programs, blocks, stride, True, False, SEED_PER_ROW, OFFSET_PER_ROW,
            )  # fmt: skip


@triton.jit
def _gather_and_cut(
    logits_ptr, plan_ptr, numbers_ptr, gathered_ptr, seed_ptr, offset_ptr, tokens_ptr, valid_ptr,
    cuts_ptr, row, mode, launch, share, programs, stride, SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Gather a program's part of a row; the last program finds the cutoff, or draws."""
    low = tl.load(plan_ptr + LOW).to(tl.int32)
    high = tl.load(plan_ptr + HIGH).to(tl.int32)
    _gather(logits_ptr, plan_ptr, gathered_ptr, low, high, share, programs, stride)
    if last_to_arrive(plan_ptr, programs):
        n = tl.load(plan_ptr + TAKEN, cache_modifier=".cg").to(tl.int32)
        drawn = tl.load(plan_ptr + DRAWN)
        if (mode == GATHER) & (n <= GATHERED):
            seed, offset, number = noise_of_rows(
                seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
            )
            p = tl.load(numbers_ptr + P)
            token, cut = draw_of_few(
                gathered_ptr, n, first_key(low), drawn, tl.load(plan_ptr + K).to(tl.int32), p,
                p < 1.0, first_key(low), tl.load(numbers_ptr + TOP),
                tl.load(numbers_ptr + SHARPNESS), tl.load(numbers_ptr + TEMPERATURE), seed, offset,
                number,
            )  # fmt: skip
            tl.store(tokens_ptr + row, token.to(tl.int64))
            tl.store(valid_ptr + row, token >= 0)
            set_mode(plan_ptr, DONE, launch + 1)
        else:
            cut = _cutoff(
                logits_ptr, plan_ptr, numbers_ptr, gathered_ptr, n, mode & ~FEW, low, high, stride
            )
            tl.store(plan_ptr + CUT, cut)
            set_mode(plan_ptr, tl.where(drawn >= cut, DONE, RACE), launch + 1)
        if cuts_ptr is not None:
            tl.store(cuts_ptr + row, cut)


@triton.jit
def _gather(logits_ptr, plan_ptr, gathered_ptr, low, high, share, programs, stride):
    """Append the keys of a program's tokens in [low, high) to those of its row.

    The order of the keys does not matter, because later launches use integer arithmetic. The tokens
    are read twice, to count and to store, so that reads do not wait for the atomic counter.
    """
    counts = tl.zeros((SOUGHT,), tl.int32)
    for first in tl.range(share * SOUGHT, stride, programs * SOUGHT):
        token = first + tl.arange(0, SOUGHT)
        y = tl.load(logits_ptr + token, mask=token < stride, other=float("-inf"))
        counts += ((ordered(y) >= low) & (ordered(y) < high)).to(tl.int32)
    n = tl.sum(counts)
    if n > 0:
        place = tl.atomic_add(plan_ptr + TAKEN, n.to(tl.int64)).to(tl.int32)
        place += tl.cumsum(counts, axis=0) - counts
        for first in tl.range(share * SOUGHT, stride, programs * SOUGHT):
            token = first + tl.arange(0, SOUGHT)
            y = tl.load(logits_ptr + token, mask=token < stride, other=float("-inf"))
            taken = (ordered(y) >= low) & (ordered(y) < high)
            tl.store(gathered_ptr + place, ordered_key(y, token), mask=taken & (place < GATHERED))
            place += taken.to(tl.int32)


@triton.jit
def _cutoff(logits_ptr, plan_ptr, numbers_ptr, gathered_ptr, n, mode, low, high, stride):
    """Return the cutoff of a row, a key.

        n gathered         mode        top-p    the cutoff is where
        room for all       BY_MASS     yes      `target` mass is reached among the gathered
        room for all       others      no       `target` tokens are reached among the gathered
        room for all       others      yes      then p of the mass from there on, in the whole row
        more than room     BY_MASS     yes      `target` mass is reached in the whole row
        more than room     others      no       k tokens are reached in the whole row
        more than room     others      yes      then p of the mass from there on, in the whole row

    Among the gathered, tokens or mass above the interval are subtracted from `target`. BY_MASS is
    top-p without top-k.
    """
    k = tl.load(plan_ptr + K).to(tl.int32)
    p = tl.load(numbers_ptr + P)
    top = tl.load(numbers_ptr + TOP)
    sharpness = tl.load(numbers_ptr + SHARPNESS)
    target = tl.load(numbers_ptr + TARGET)
    above = tl.load(numbers_ptr + ABOVE)
    cut = first_key(low)
    end = first_key(high)
    keys = load_keys(gathered_ptr, 0, n, GATHERED)
    y, _token = unpacked(keys)
    weights = packed_weights(y, keys > NOTHING, top, sharpness)
    if n > GATHERED:
        end = first_key(ordered(top) + 1)
        mass = target
        if mode != BY_MASS:
            cut, mass = cut_by_scans(
                logits_ptr, stride, cut, end, k.to(tl.float32), top, sharpness, False, ROW_AT_ONCE
            )
            mass = tl.maximum(p * mass, 1e-30)
        if p < 1.0:
            cut, mass = cut_by_scans(
                logits_ptr, stride, cut, end, mass, top, sharpness, True, ROW_AT_ONCE
            )
    elif mode == BY_MASS:
        units = ((target - above) * MASS_UNITS).to(tl.int64)
        cut, _units = cut_among(keys, weights, cut, end, tl.maximum(units, 1), True)
    else:
        tokens = (target - above).to(tl.int64)
        cut, _tokens = cut_among(keys, weights, cut, end, tl.maximum(tokens, 1), False)
        if p < 1.0:  # in addition to a large k
            end = first_key(ordered(top) + 1)
            _counts, masses = sums_of_row(
                logits_ptr, stride, cut + tl.zeros((WAYS,), tl.int64), top, sharpness, ROW_AT_ONCE
            )
            mass = tl.maximum(p * tl.max(masses), 1e-30)
            cut, mass = cut_by_scans(
                logits_ptr, stride, cut, end, mass, top, sharpness, True, ROW_AT_ONCE
            )
    return cut


@triton.jit(do_not_specialize=["launch", "B", "blocks"])
def sampling_race_kernel(
    logits_ptr,  # [B, stride] fp32
    largest_ptr,  # [stride // 128, B, 4] fp32
    plan_ptr,  # [B, PLAN] int64
    numbers_ptr,  # [B, NUMBERS] fp32
    tops_ptr,  # [B, blocks] fp32, scratch of test_or_race; or None: no row is TESTED
    masses_ptr,  # [B, blocks, 2] int64, scratch of test_or_race, or None
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    launch,  # its number among those over rows (truncated.row_plan)
    B,
    stride,
    blocks,
    ROWS: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        wait_for_launch()
    modes = modes_of_rows(plan_ptr, launch, B, ROWS)
    row, share, programs = assigned((modes == RACE) | (modes == TESTED))
    if programs > 0:
        plan_ptr += row * PLAN
        logits_ptr += row.to(tl.int64) * stride
        if tl.load(plan_ptr + MODE + launch) == RACE:
            _race_of_kept(
                logits_ptr, largest_ptr, plan_ptr, numbers_ptr, seed_ptr, offset_ptr, tokens_ptr,
                valid_ptr, row, share, programs, B, stride, blocks, SEED_PER_ROW, OFFSET_PER_ROW,
            )  # fmt: skip
        elif tops_ptr is not None:
            test_planned(
                logits_ptr, plan_ptr, numbers_ptr + row * NUMBERS, tops_ptr + row * blocks,
                masses_ptr + row * blocks * 2, seed_ptr, offset_ptr, tokens_ptr, valid_ptr,
                row, share, programs, blocks, stride, False, True, SEED_PER_ROW, OFFSET_PER_ROW,
            )  # fmt: skip


@triton.jit
def _race_of_kept(
    logits_ptr, largest_ptr, plan_ptr, numbers_ptr, seed_ptr, offset_ptr, tokens_ptr, valid_ptr,
    row, share, programs, B, stride, blocks, SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Race a program's blocks from the cutoff on; the last program stores the winner."""
    RUNS: tl.constexpr = BLOCK // RUN
    groups = stride // 128 * 4
    cut = tl.load(plan_ptr + CUT)
    seed, offset, number = noise_of_rows(
        seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
    )
    T = tl.load(numbers_ptr + row * NUMBERS + TEMPERATURE)
    best = tl.full((RUNS, RUN // 4), LOWEST_KEY, tl.int64)
    for block in tl.range(share, blocks, programs):
        group = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        ptrs = largest_ptr + place_of_largest(group, row, B)
        largest = tl.load(ptrs, mask=group < groups, other=float("-inf"))
        if tl.max(first_key(ordered(largest))) >= (cut >> 32) << 32:
            y, word = load_runs(logits_ptr, block, stride, RUNS)
            more = race(split_words(y), word, cut, T, seed, offset, number)
            best = tl.maximum(best, more)
    best_key = tl.max(tl.max(best, axis=1), axis=0)
    if best_key > LOWEST_KEY:
        tl.atomic_max(plan_ptr + BEST, best_key)
    if last_to_arrive(plan_ptr, programs) & (tl.load(plan_ptr + DRAWN) < cut):
        token = token_of_key(tl.load(plan_ptr + BEST, cache_modifier=".cg"))
        tl.store(tokens_ptr + row, token.to(tl.int64))
        tl.store(valid_ptr + row, token >= 0)
