"""Device code: many programs search for a row's cutoff, one launch after another.

In a row that is searched, the programs add up the counts or masses from each of 8 thresholds on.
The cutoff lies between two thresholds, and the next launch divides that interval, until few tokens
remain. The first launch also adds up the mass of the tokens before the draw from the whole
vocabulary. With top-p alone this sum decides whether the draw is kept; if so, the row is done. In a
row that is TESTED, the launches alternate between a test of its token and a race of the tokens
before that token (truncated.top_p).

A row is divided into blocks of 2048 tokens, and the programs share the blocks; the result does not
depend on the number of programs. All programs of a launch serve the rows that need the launch. The
sums of a block are stored. The last program of a row to arrive adds them up in the order of the
blocks, and decides.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.rows import noise_of_rows
from fsbench.kernels.noise.keys import ordered, value_of
from fsbench.kernels.truncated.cutoff import GATHERED, first_key, is_kept
from fsbench.kernels.truncated.row_plan import (
    ABOVE,
    ARRIVALS,
    BEST,
    BY_COUNT,
    BY_MASS,
    DONE,
    DRAWN,
    FEW,
    HIGH,
    LOW,
    MODE,
    NUMBERS,
    PLAN,
    SHARPNESS,
    START,
    TARGET,
    TEMPERATURE,
    TESTED,
    TOP,
    P,
    assigned,
    last_to_arrive,
    modes_of_rows,
    set_mode,
    wait_for_launch,
)
from fsbench.kernels.truncated.top_p import BLOCK, test_or_race

SLICE = tl.constexpr(128)
"""Tokens of a block that are in registers at once, with a sum for each threshold."""

SECTIONS = tl.constexpr(8)
"""Thresholds of a launch."""

LARGEST = tl.constexpr(3.4028234663852886e38)

SURELY = tl.constexpr(1.0 - 2.0**-18)
"""1 minus an upper bound of the relative difference of two sums of the same masses."""


@triton.jit(do_not_specialize=["launch", "B", "blocks"])
def sampling_narrow_kernel(
    logits_ptr,  # [B, stride] fp32
    plan_ptr,  # [B, PLAN] int64
    numbers_ptr,  # [B, NUMBERS] fp32
    sums_ptr,  # [B, blocks, SECTIONS] fp32, scratch
    before_ptr,  # [B, blocks] fp32, scratch: mass before the draw; or None: not needed
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
    ROWS: tl.constexpr,  # a power of two, at least B
    RACE: tl.constexpr,  # see test_or_race
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    USE_PDL: tl.constexpr,  # programmatic dependent launch
):
    if USE_PDL:
        wait_for_launch()
    modes = modes_of_rows(plan_ptr, launch, B, ROWS)
    row, share, programs = assigned((modes == BY_COUNT) | (modes == BY_MASS) | (modes == TESTED))
    if share < programs:
        plan_ptr += row * PLAN
        numbers_ptr += row * NUMBERS
        logits_ptr += row.to(tl.int64) * stride
        mode = tl.load(plan_ptr + MODE + launch)
        if before_ptr is not None:
            before_ptr += row.to(tl.int64) * blocks
        if mode != TESTED:
            _search(
                logits_ptr, plan_ptr, numbers_ptr, sums_ptr + row.to(tl.int64) * blocks * SECTIONS,
                before_ptr, mode, launch, share, programs, blocks, stride,
            )  # fmt: skip
        elif tops_ptr is not None:
            last, redraw = test_planned(
                logits_ptr, plan_ptr, numbers_ptr, tops_ptr + row * blocks,
                masses_ptr + row * blocks * 2, seed_ptr, offset_ptr, tokens_ptr, valid_ptr,
                row, share, programs, blocks, stride, RACE, False, SEED_PER_ROW, OFFSET_PER_ROW,
            )  # fmt: skip
            if last & (redraw == 0):
                set_mode(plan_ptr, DONE, launch + 1)


@triton.jit
def test_planned(
    logits_ptr, plan_ptr, numbers_ptr, tops_ptr, masses_ptr, seed_ptr, offset_ptr, tokens_ptr,
    valid_ptr, row, share, programs, blocks, stride, RACE: tl.constexpr, LAST: tl.constexpr,
    SEED_PER_ROW: tl.constexpr, OFFSET_PER_ROW: tl.constexpr,
):  # fmt: skip
    """Call test_or_race for a row with a plan; pointers up to masses_ptr are those of the row."""
    seed, offset, number = noise_of_rows(
        seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
    )
    return test_or_race(
        logits_ptr, tops_ptr, masses_ptr, plan_ptr + BEST, plan_ptr + ARRIVALS, tokens_ptr + row,
        valid_ptr + row, tl.load(plan_ptr + LOW).to(tl.int32), tl.load(numbers_ptr + P),
        tl.load(numbers_ptr + SHARPNESS), tl.load(numbers_ptr + TEMPERATURE), seed, offset, number,
        share, programs, blocks, stride, RACE, LAST,
    )  # fmt: skip


@triton.jit
def _search(logits_ptr, plan_ptr, numbers_ptr, sums_ptr, before_ptr, mode, launch, share, programs,
            blocks, stride):  # fmt: skip
    """Add up a program's blocks from each threshold on; the last program narrows the interval."""
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
        _narrow(plan_ptr, numbers_ptr, sums_ptr, before_ptr, launch, mode, t, high, blocks)


@triton.jit
def _narrow(plan_ptr, numbers_ptr, sums_ptr, before_ptr, launch, mode, t, high, blocks):
    """Make the two thresholds around the cutoff the new ends of the interval."""
    AT_ONCE: tl.constexpr = 64
    section = tl.arange(0, SECTIONS)
    sums = tl.zeros((AT_ONCE, SECTIONS), tl.float32)
    for first in tl.range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        sum_ptrs = sums_ptr + block[:, None] * SECTIONS + section[None, :]
        sums += tl.load(sum_ptrs, mask=(block < blocks)[:, None], other=0.0, cache_modifier=".cg")
    total = tl.sum(sums, axis=0)
    target = tl.load(numbers_ptr + TARGET)
    if (mode == BY_MASS) & (target == 0.0):
        everything = tl.max(tl.where(section == 0, total, 0.0))
        target = tl.maximum(tl.load(numbers_ptr + P) * everything, 1e-30)
    enough = (total >= target) | (section == 0)
    low = tl.max(tl.where(enough, t, -0x7FFFFFFF))
    high = tl.min(tl.where(enough, high, t))
    above = tl.maximum(tl.load(numbers_ptr + ABOVE), tl.max(tl.where(enough, 0.0, total)))
    # Each of the tokens between weighs at least as much as one at `low` would.
    from_low = tl.min(tl.where(enough, total, LARGEST))
    least = tl.full((), 1.0, tl.float32)
    if mode == BY_MASS:
        distance = value_of(low) - tl.load(numbers_ptr + TOP)
        least = tl.exp2(tl.load(numbers_ptr + SHARPNESS) * distance)
    # Not the whole buffer, because sums are rounded.
    next_mode = tl.where(from_low - above < 0.9 * GATHERED * least, mode | FEW, mode)
    if before_ptr is not None:
        before = tl.zeros((AT_ONCE,), tl.float32)
        for first in tl.range(0, blocks, AT_ONCE):
            block = first + tl.arange(0, AT_ONCE)
            before += tl.load(before_ptr + block, mask=block < blocks, other=0.0,
                              cache_modifier=".cg")  # fmt: skip
        # The cutoff has other sums. If the draw is closer to it than SURELY, the cutoff decides.
        is_kept_draw = (mode == BY_MASS) & (tl.sum(before) < target * SURELY)
        is_kept_draw = is_kept_draw & (tl.load(plan_ptr + DRAWN) >= first_key(low))
        next_mode = tl.where(is_kept_draw, DONE, next_mode)
    set_mode(plan_ptr, next_mode, launch + 1)
    tl.store(plan_ptr + LOW, low.to(tl.int64))
    tl.store(plan_ptr + HIGH, high.to(tl.int64))
    # START never falls: if the cutoff is in the first section, that section begins at START.
    tl.store(numbers_ptr + START, tl.maximum(value_of(low), tl.load(numbers_ptr + START)))
    tl.store(numbers_ptr + TARGET, target)
    tl.store(numbers_ptr + ABOVE, above)
