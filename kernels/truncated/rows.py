"""Device code of truncated sampling: rows that need many programs.

A row is cut into blocks of 2048 tokens, and programs share its blocks; nothing that they find
depends on how many they are. All programs of a launch are for the rows that need it. Sums over a
block are stored, and the last program of a row to arrive adds them up in the order of the blocks,
and decides:

    sampling_sections_kernel
        counts or masses from each of 8 thresholds on: between two of them is the cutoff. Launched
        several times, then with thresholds between these two, until few tokens are left. The first
        time also the mass of the tokens before the draw from all: with top-p alone this decides
        whether it is kept, and then the row is done
    sampling_cutoff_kernel
        gathers the tokens between, and finds the cutoff among them. Where these are all that can be
        kept it draws, too, and the row is done
    sampling_race_kernel
        the kept tokens race, unless the draw from all is one of them
"""

import triton
import triton.language as tl

from fsbench.kernels.device.rows import noise_of_rows
from fsbench.kernels.device.stored_logits import place_of_largest
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered, ordered_key, token_of_key, value_of
from fsbench.kernels.noise.words import split_words
from fsbench.kernels.truncated.cutoff import (
    GATHERED,
    MASS_UNITS,
    NOTHING,
    WAYS,
    cut_among,
    cut_by_scans,
    first_key,
    is_kept,
    load_keys,
    packed_weights,
    sums_of_row,
    unpacked,
)
from fsbench.kernels.truncated.gathered import draw_of_few
from fsbench.kernels.truncated.plan import (
    ABOVE,
    BEST,
    BY_COUNT,
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
    START,
    TAKEN,
    TEMPERATURE,
    TOP,
    WANTED,
    K,
    P,
    assigned,
    last_to_arrive,
    modes_of_rows,
    set_mode,
)
from fsbench.kernels.truncated.race import RUN, load_runs, race

BLOCK = tl.constexpr(2048)
"""Tokens of a block: what is added up at once."""

SLICE = tl.constexpr(128)
"""Tokens of a block that are in registers at once, with a sum for each threshold."""

SECTIONS = tl.constexpr(8)
"""Thresholds of a launch."""

SOUGHT = tl.constexpr(4096)
"""Tokens that are looked through at once for those to gather."""

ROW_AT_ONCE = tl.constexpr(512)
"""Tokens that one program takes at once of a row that it reads alone."""

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=["launch", "B", "blocks"])
def sampling_sections_kernel(
    logits_ptr,  # [B, stride] fp32
    plan_ptr,  # [B, PLAN] int64
    numbers_ptr,  # [B, NUMBERS] fp32
    sums_ptr,  # [B, blocks, SECTIONS] fp32, scratch
    before_ptr,  # [B, blocks] fp32, scratch: mass before the draw; None after the first time
    launch,  # its number among those over rows (truncated.plan)
    B,
    stride,
    blocks,
    ROWS: tl.constexpr,  # a power of two, at least B
    CUTS: tl.constexpr,  # cutoffs are asked for, so no row is done here
):
    modes = modes_of_rows(plan_ptr, launch, B, ROWS)
    row, share, programs = assigned((modes == BY_COUNT) | (modes == BY_MASS))
    if programs > 0:
        plan_ptr += row * PLAN
        numbers_ptr += row * NUMBERS
        logits_ptr += row.to(tl.int64) * stride
        sums_ptr += row.to(tl.int64) * blocks * SECTIONS
        if before_ptr is not None:
            before_ptr += row.to(tl.int64) * blocks
        mode = tl.load(plan_ptr + MODE + launch)
        section = tl.arange(0, SECTIONS)
        low = tl.load(plan_ptr + LOW).to(tl.int32)
        high = tl.load(plan_ptr + HIGH).to(tl.int32)
        top = tl.load(numbers_ptr + TOP)
        sharpness = tl.load(numbers_ptr + SHARPNESS)
        part = section.to(tl.float32) / SECTIONS
        start = tl.load(numbers_ptr + START)
        t = ordered(start * (1.0 - part) + tl.minimum(value_of(high), LARGEST) * part)
        t = tl.where(section == 0, low, tl.minimum(tl.maximum(t, low), high - 1))
        # The first key above the draw's.
        after = tl.load(plan_ptr + DRAWN) + 1
        for block in tl.range(share, blocks, programs):
            sums = tl.zeros((SECTIONS, SLICE), tl.float32)
            before = tl.zeros((SLICE,), tl.float32)
            for i in tl.static_range(BLOCK // SLICE):
                token = block * BLOCK + i * SLICE + tl.arange(0, SLICE)
                y = tl.load(logits_ptr + token, mask=token < stride, other=float("-inf"))
                weight = tl.where(mode == BY_MASS, tl.exp2(sharpness * (y - top)), 1.0)
                reached = ordered(y)[None, :] >= t[:, None]
                sums = tl.where(reached, sums + weight[None, :], sums)
                if before_ptr is not None:
                    before = tl.where(is_kept(y, token, after), before + weight, before)
            tl.store(sums_ptr + block * SECTIONS + section, tl.sum(sums, axis=1))
            if before_ptr is not None:
                tl.store(before_ptr + block, tl.sum(before))
        if last_to_arrive(plan_ptr, programs):
            _narrow(
                plan_ptr, numbers_ptr, sums_ptr, before_ptr, launch, mode, t, high, blocks, CUTS
            )  # fmt: skip


@triton.jit
def _narrow(plan_ptr, numbers_ptr, sums_ptr, before_ptr, launch, mode, t, high, blocks,
            CUTS: tl.constexpr):  # fmt: skip
    """The two thresholds with the cutoff between them are the new ends."""
    AT_ONCE: tl.constexpr = 64
    section = tl.arange(0, SECTIONS)
    sums = tl.zeros((AT_ONCE, SECTIONS), tl.float32)
    for first in tl.range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        at = sums_ptr + block[:, None] * SECTIONS + section[None, :]
        sums += tl.load(at, mask=(block < blocks)[:, None], other=0.0, cache_modifier=".cg")
    total = tl.sum(sums, axis=0)
    wanted = tl.load(numbers_ptr + WANTED)
    if (mode == BY_MASS) & (wanted == 0.0):
        everything = tl.max(tl.where(section == 0, total, 0.0))
        wanted = tl.maximum(tl.load(numbers_ptr + P) * everything, 1e-30)
    enough = (total >= wanted) | (section == 0)
    low = tl.max(tl.where(enough, t, -0x7FFFFFFF))
    high = tl.min(tl.where(enough, high, t))
    above = tl.maximum(tl.load(numbers_ptr + ABOVE), tl.max(tl.where(enough, 0.0, total)))
    # Each of the tokens between weighs at least as much as one at `low` would.
    from_low = tl.min(tl.where(enough, total, LARGEST))
    least = tl.full((), 1.0, tl.float32)
    if mode == BY_MASS:
        distance = value_of(low) - tl.load(numbers_ptr + TOP)
        least = tl.exp2(tl.load(numbers_ptr + SHARPNESS) * distance)
    # Not all of the room, since sums are rounded.
    then = tl.where(from_low - above < 0.9 * GATHERED * least, mode | FEW, mode)
    if before_ptr is not None:
        before = tl.zeros((AT_ONCE,), tl.float32)
        for first in tl.range(0, blocks, AT_ONCE):
            block = first + tl.arange(0, AT_ONCE)
            before += tl.load(before_ptr + block, mask=block < blocks, other=0.0,
                              cache_modifier=".cg")  # fmt: skip
        stands = (mode == BY_MASS) & (tl.sum(before) < wanted)
        stands = stands & (tl.load(plan_ptr + DRAWN) >= first_key(low))
        then = tl.where(stands & (not CUTS), DONE, then)
    set_mode(plan_ptr, then, launch + 1)
    tl.store(plan_ptr + LOW, low.to(tl.int64))
    tl.store(plan_ptr + HIGH, high.to(tl.int64))
    # Not below where it began: if the cutoff is in the first section, that has no end of its own.
    tl.store(numbers_ptr + START, tl.maximum(value_of(low), tl.load(numbers_ptr + START)))
    tl.store(numbers_ptr + WANTED, wanted)
    tl.store(numbers_ptr + ABOVE, above)


@triton.jit(do_not_specialize=["launch", "B"])
def sampling_cutoff_kernel(
    logits_ptr,  # [B, stride] fp32
    plan_ptr,  # [B, PLAN] int64
    numbers_ptr,  # [B, NUMBERS] fp32
    gathered_ptr,  # [B, GATHERED] int64, scratch: keys
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    cuts_ptr,  # [B] int64, out: keys; or None
    launch,  # its number among those over rows (truncated.plan)
    B,
    stride,
    ROWS: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
):
    modes = modes_of_rows(plan_ptr, launch, B, ROWS)
    row, share, programs = assigned((modes != DONE) & (modes != RACE))
    if programs > 0:
        plan_ptr += row * PLAN
        numbers_ptr += row * NUMBERS
        logits_ptr += row.to(tl.int64) * stride
        gathered_ptr += row.to(tl.int64) * GATHERED
        mode = tl.load(plan_ptr + MODE + launch)
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
                    tl.load(numbers_ptr + SHARPNESS), tl.load(numbers_ptr + TEMPERATURE), seed,
                    offset, number,
                )  # fmt: skip
                tl.store(tokens_ptr + row, token.to(tl.int64))
                tl.store(valid_ptr + row, token >= 0)
                set_mode(plan_ptr, DONE, launch + 1)
            else:
                cut = _cutoff(
                    logits_ptr, plan_ptr, numbers_ptr, gathered_ptr, n, mode & ~FEW, low, high,
                    stride,
                )  # fmt: skip
                tl.store(plan_ptr + CUT, cut)
                set_mode(plan_ptr, tl.where(drawn >= cut, DONE, RACE), launch + 1)
            if cuts_ptr is not None:
                tl.store(cuts_ptr + row, cut)


@triton.jit
def _gather(logits_ptr, plan_ptr, gathered_ptr, low, high, share, programs, stride):
    """Append the keys of a program's tokens in [low, high) to those of its row.

    In which order does not matter: what is done with them is integer. It reads twice, to count and
    to store, so that it need not wait for anything while it reads.
    """
    many = tl.zeros((SOUGHT,), tl.int32)
    for first in tl.range(share * SOUGHT, stride, programs * SOUGHT):
        token = first + tl.arange(0, SOUGHT)
        y = tl.load(logits_ptr + token, mask=token < stride, other=float("-inf"))
        many += ((ordered(y) >= low) & (ordered(y) < high)).to(tl.int32)
    n = tl.sum(many)
    if n > 0:
        place = tl.atomic_add(plan_ptr + TAKEN, n.to(tl.int64)).to(tl.int32)
        place += tl.cumsum(many, axis=0) - many
        for first in tl.range(share * SOUGHT, stride, programs * SOUGHT):
            token = first + tl.arange(0, SOUGHT)
            y = tl.load(logits_ptr + token, mask=token < stride, other=float("-inf"))
            taken = (ordered(y) >= low) & (ordered(y) < high)
            tl.store(gathered_ptr + place, ordered_key(y, token), mask=taken & (place < GATHERED))
            place += taken.to(tl.int32)


@triton.jit
def _cutoff(logits_ptr, plan_ptr, numbers_ptr, gathered_ptr, n, mode, low, high, stride):
    """The cutoff of a row, a key.

        n gathered         mode        top-p    the cutoff is where
        room for all       BY_MASS     yes      `wanted` mass is reached among the gathered
        room for all       others      no       `wanted` tokens are reached among the gathered
        room for all       others      yes      then p of the mass from there on, in the whole row
        more than room     BY_MASS     yes      `wanted` mass is reached in the whole row
        more than room     others      no       k tokens are reached in the whole row
        more than room     others      yes      then p of the mass from there on, in the whole row

    `wanted` of the gathered is less by what is above them. BY_MASS is top-p alone, without top-k.
    """
    k = tl.load(plan_ptr + K).to(tl.int32)
    p = tl.load(numbers_ptr + P)
    top = tl.load(numbers_ptr + TOP)
    sharpness = tl.load(numbers_ptr + SHARPNESS)
    wanted = tl.load(numbers_ptr + WANTED)
    above = tl.load(numbers_ptr + ABOVE)
    cut = first_key(low)
    end = first_key(high)
    keys = load_keys(gathered_ptr, 0, n, GATHERED)
    y, _token = unpacked(keys)
    weights = packed_weights(y, keys > NOTHING, top, sharpness)
    if n > GATHERED:
        end = first_key(ordered(top) + 1)
        mass = wanted
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
        units = ((wanted - above) * MASS_UNITS).to(tl.int64)
        cut, _units = cut_among(keys, weights, cut, end, tl.maximum(units, 1), True)
    else:
        tokens = (wanted - above).to(tl.int64)
        cut, _tokens = cut_among(keys, weights, cut, end, tl.maximum(tokens, 1), False)
        if p < 1.0:  # beside a large k
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
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    launch,  # its number among those over rows (truncated.plan)
    B,
    stride,
    blocks,
    ROWS: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
):
    RUNS: tl.constexpr = BLOCK // RUN
    row, share, programs = assigned(modes_of_rows(plan_ptr, launch, B, ROWS) == RACE)
    if programs > 0:
        plan_ptr += row * PLAN
        logits_ptr += row.to(tl.int64) * stride
        groups = stride // 128 * 4
        cut = tl.load(plan_ptr + CUT)
        seed, offset, number = noise_of_rows(
            seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
        )
        T = tl.load(numbers_ptr + row * NUMBERS + TEMPERATURE)
        best = tl.full((RUNS, RUN // 4), LOWEST_KEY, tl.int64)
        for block in tl.range(share, blocks, programs):
            group = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
            at = largest_ptr + place_of_largest(group, row, B)
            largest = tl.load(at, mask=group < groups, other=float("-inf"))
            if tl.max(first_key(ordered(largest))) >= (cut >> 32) << 32:
                y, word = load_runs(logits_ptr, block, stride, RUNS)
                more = race(split_words(y), word, cut, T, seed, offset, number)
                best = tl.maximum(best, more)
        found = tl.max(tl.max(best, axis=1), axis=0)
        if found > LOWEST_KEY:
            tl.atomic_max(plan_ptr + BEST, found)
        if last_to_arrive(plan_ptr, programs) & (tl.load(plan_ptr + DRAWN) < cut):
            token = token_of_key(tl.load(plan_ptr + BEST, cache_modifier=".cg"))
            tl.store(tokens_ptr + row, token.to(tl.int64))
            tl.store(valid_ptr + row, token >= 0)
