"""Device code: select the groups of a row that can hold kept tokens, and draw if they are few.

The fused kernel has drawn a token from the whole vocabulary and stored the logits and the largest
logit of each group of 32. If the filters keep that token, it is a draw from the kept tokens. If
not, the kept tokens race (rejection sampling whose second attempt cannot fail).
`sampling_look_kernel`, one program per row, uses the maxima to find the groups that can hold a kept
token:

    top-k   the kth largest of all maxima is at most the kth largest logit
    min-p   the threshold is known from the largest logit alone

If these groups are few, the program gathers their tokens and draws from them, and the row is done.
If not, it writes a plan, and the kernels of truncated.search and truncated.long_rows finish the row
with many programs. A row with top-p alone is planned at once: its draw is tested (truncated.top_p).
"""

import triton
import triton.language as tl

from fsbench.kernels.device.rows import noise_of_rows, of_row
from fsbench.kernels.device.stored_logits import place_of_largest
from fsbench.kernels.device.thresholds import places, reached_by
from fsbench.kernels.noise.arithmetic import LOG2_E, log, nan_max
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.group import group_of_token, token_of_member
from fsbench.kernels.noise.keys import LOWEST, LOWEST_KEY, ordered, ordered_key, value_of
from fsbench.kernels.truncated.cutoff import GATHERED, first_key
from fsbench.kernels.truncated.race import draw_of_gathered
from fsbench.kernels.truncated.row_plan import (
    BY_COUNT,
    BY_MASS,
    DONE,
    GATHER,
    PLAN,
    RACE,
    TESTED,
    mass_wanted,
    set_mode,
    store_plan,
    wait_for_launch,
)
from fsbench.kernels.truncated.top_p import LEAST_OF_ROWS

GROUP = tl.constexpr(32)
"""Tokens whose largest logit is stored: a group of the group noise."""

GATHERED_K = tl.constexpr(2048)
"""Up to this k all tokens that reach the kth largest maximum are gathered at once."""

HEADER = tl.constexpr(32)
"""Numbers in front of the groups: two counters, and the rest of their line of 128 bytes."""

SAMPLES = tl.constexpr(64)
"""Runs of 32 tokens whose smallest logit is where the first search begins."""


@triton.jit(do_not_specialize=["top_k", "V", "capacity"])
def sampling_look_kernel(
    logits_ptr,  # [B, stride] fp32; penalties are written back
    largest_ptr,  # [stride // 128, B, 4] fp32; penalties are written back
    found_ptr,  # [B, HEADER + CHUNK] int32, scratch: number of groups and of tokens; the groups
    keys_ptr,  # [B, least of CHUNK * 32 and GATHERED] int64, scratch: tokens in these groups
    plan_ptr,  # [B, PLAN] int64, out (truncated.row_plan); or None: every row is done here
    numbers_ptr,  # [B, NUMBERS] fp32, out; or None
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32; so are top_p, min_p and the penalties
    top_k,  # int32, or pointer to [B] int32 or int64
    top_p,
    min_p,
    history_ptr,  # [B, capacity] int32: distinct tokens; or None
    counts_ptr,  # [B, capacity] int32: how often each occurs in the output
    lengths_ptr,  # [B] int32: number of tokens in a row's history
    repetition,
    presence,
    frequency,
    tokens_ptr,  # [B] int64: the draws from all tokens, -1: no draw; out
    valid_ptr,  # [B] bool, out
    cuts_ptr,  # [B] int64, out: the key from which on tokens are kept; or None
    V,
    stride,
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
    GROUPS: tl.constexpr,  # a power of two, at least stride // 32
    CHUNK: tl.constexpr,  # groups whose tokens are gathered, a power of two
    TESTS: tl.constexpr,  # rows with top-p, and not too small a one, without top-k are TESTED
    USE_PDL: tl.constexpr,  # programmatic dependent launch
):
    if USE_PDL:
        wait_for_launch()
    row = tl.program_id(0)
    B = tl.num_programs(0)
    groups = stride // 128 * 4  # written as a multiple of 4, so that maxima load by four
    logits_ptr += row.to(tl.int64) * stride
    found_ptr += row * (HEADER + CHUNK)
    keys_ptr += row.to(tl.int64) * min(CHUNK * GROUP, GATHERED)
    counter = tl.arange(0, 2)
    tl.store(found_ptr + counter, counter * 0)
    defined = True
    if history_ptr is not None:
        repeat = of_row(repetition, row, tl.float32, REPETITION_PER_ROW)
        present = of_row(presence, row, tl.float32, PRESENCE_PER_ROW)
        often = of_row(frequency, row, tl.float32, FREQUENCY_PER_ROW)
        defined = (repeat > 0.0) & (repeat < float("inf"))
        defined &= (tl.abs(present) < float("inf")) & (tl.abs(often) < float("inf"))
        _penalize(
            logits_ptr, largest_ptr, row, B, history_ptr + row.to(tl.int64) * capacity,
            counts_ptr + row.to(tl.int64) * capacity, tl.load(lengths_ptr + row), repeat, present,
            often, V,
        )  # fmt: skip

    seed, offset, number = noise_of_rows(
        seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
    )
    T = of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW)
    T, inverse_temperature = temperatures(T)
    sharpness = inverse_temperature * LOG2_E
    k = of_row(top_k, row, tl.int64 if TOP_K_PER_ROW else tl.int32, TOP_K_PER_ROW)
    p = of_row(top_p, row, tl.float32, TOP_P_PER_ROW)
    least = of_row(min_p, row, tl.float32, MIN_P_PER_ROW)
    sampled = T > 0.0
    k = tl.where(sampled, tl.where(k > 0, tl.minimum(k, V), V), 1).to(tl.int32)
    # p and least may be NaN; comparisons are then false.
    tested = sampled & (k == V) & (p >= LEAST_OF_ROWS) & (p < 1.0)
    by_p = sampled & (p < 1.0)
    p = mass_wanted(p)
    drawn = tl.full((), LOWEST_KEY, tl.int64)
    if TESTS:  # the maxima are not needed
        at_once = tested & (least <= 0.0) & (tl.load(tokens_ptr + row) >= 0)
        if at_once:
            low = tl.full((), LOWEST, tl.int32)
            store_plan(
                plan_ptr, numbers_ptr, row, TESTED, low, low, k, drawn, 0.0, 0.0, sharpness, p, T
            )
            return
    if history_ptr is None:  # penalties change the distribution after the draw
        token = tl.load(tokens_ptr + row).to(tl.int32)
        y = tl.load(logits_ptr + token, mask=token >= 0, other=float("-inf"))
        drawn = tl.where(token >= 0, ordered_key(y, token), drawn)

    group = tl.arange(0, GROUPS)
    largest_ptrs = largest_ptr + place_of_largest(group, row, B)
    maxima = tl.load(largest_ptrs, mask=group < groups, other=float("-inf"))
    top = tl.reduce(maxima, 0, nan_max)
    # T, p and least are NaN or not: NaN is not equal to itself.
    valid = (top < float("inf")) & (top > float("-inf")) & (T == T) & (p == p) & (least == least)
    valid &= defined
    top = tl.where(valid, top, 0.0)
    order = tl.where(valid, ordered(maxima), LOWEST - 1)  # -inf is LOWEST - 1
    p = tl.maximum(p, 0.0)

    above_all = ordered(top) + 1
    low = _lowest_kept(order, top, T, sampled, least, k, groups, above_all, CHUNK)
    draw_now = True
    # The cutoff of a row that is final or needs no search; other rows get theirs later.
    cut = tl.where(sampled, first_key(low), drawn)
    if plan_ptr is not None:
        # Greedy decoding, min-p alone and no filter need no search.
        is_final = valid & (drawn >= first_key(low))
        is_final = is_final & ((sampled == 0) | ((k == V) & (by_p == 0)))
        needs_plan = (is_final == 0) & (tl.sum((order >= low).to(tl.int32)) > CHUNK)
        draw_now = (is_final | needs_plan) == 0
        if needs_plan:
            _leave_plan(
                logits_ptr, plan_ptr, numbers_ptr, row, low, above_all, k, by_p, p, tested & TESTS,
                drawn, top, sharpness, T, groups, V, stride,
            )  # fmt: skip
        else:
            set_mode(plan_ptr + row * PLAN, DONE, 0)
    if draw_now:
        n = _gather_groups(logits_ptr, order, low, found_ptr, keys_ptr, CHUNK)
        floor = first_key(low)
        winner, cut = draw_of_gathered(
            logits_ptr, keys_ptr, n, floor, drawn, k, p, by_p, floor, valid, top, sharpness, T,
            seed, offset, number, stride,
        )  # fmt: skip
        tl.store(tokens_ptr + row, winner.to(tl.int64))
        tl.store(valid_ptr + row, winner >= 0)
    if cuts_ptr is not None:
        tl.store(cuts_ptr + row, cut)


@triton.jit
def _lowest_kept(order, top, T, sampled, least, k, groups, above_all, CHUNK: tl.constexpr):
    """Return the bound, `ordered`: a group whose largest logit is below it has no kept token.

    order: `ordered` of the groups' largest logits, int32 [GROUPS].
    """
    GROUPS: tl.constexpr = order.shape[0]
    low = tl.full((), LOWEST, tl.int32)
    if sampled & (least > 0.0):
        threshold = top + T * log(tl.minimum(tl.maximum(least, 1e-37), 1.0))
        low = tl.maximum(low, ordered(threshold))
    if k < groups:
        if k < groups // 16:
            # With a small k few blocks of 128 tokens have two, and blocks are fewer than groups.
            blocks = tl.max(order.reshape(GROUPS // 4, 4), axis=1)
            low = reached_by(blocks, k, low, above_all)
        if tl.sum((order >= low).to(tl.int32)) > tl.minimum(2 * k, CHUNK):
            low = reached_by(order, k, low, above_all)
    return low


@triton.jit
def _leave_plan(logits_ptr, plan_ptr, numbers_ptr, row, low, above_all, k, by_p, p, tested, drawn,
                top, sharpness, T, groups, V, stride):  # fmt: skip
    """Write the plan of a row with too many groups for this program (truncated.row_plan)."""
    mode = tl.where(by_p, BY_MASS, RACE)
    few = (k < groups) & (k <= GATHERED_K)
    mode = tl.where(k < V, tl.where(few, GATHER, BY_COUNT), tl.where(tested, TESTED, mode))
    start = tl.maximum(value_of(low), _smallest_of_sample(logits_ptr, top, stride))
    if mode == BY_MASS:
        # Tokens below have less than half of the mass that top-p removes.
        span = log(1.0 - p) - log(2.0 * V.to(tl.float32))
        start = tl.maximum(start, top + T * span)
    store_plan(
        plan_ptr, numbers_ptr, row, mode, low, above_all, k, drawn, top, start, sharpness,
        tl.where(by_p, p, 2.0), T,
    )  # fmt: skip


@triton.jit
def _gather_groups(logits_ptr, order, low, found_ptr, keys_ptr, CHUNK: tl.constexpr):
    """Store the keys from `low` on, of the groups that reach it, at keys_ptr; return their number.

    Returns GATHERED + 1 if more than CHUNK groups reach `low`. The keys have no defined order;
    later steps use integer arithmetic.
    """
    GROUPS: tl.constexpr = order.shape[0]
    AT_ONCE: tl.constexpr = min(CHUNK, 128)
    place = places(found_ptr, order, low)
    tl.store(
        found_ptr + HEADER + place, tl.arange(0, GROUPS), mask=(order >= low) & (place < CHUNK)
    )
    tl.debug_barrier()
    groups = tl.load(found_ptr, cache_modifier=".cg")
    for first in tl.range(0, tl.minimum(groups, CHUNK), AT_ONCE):
        index = first + tl.arange(0, AT_ONCE)
        exists = index < groups
        group = tl.load(found_ptr + HEADER + index, mask=exists, other=0, cache_modifier=".cg")
        token = token_of_member(0, group[:, None], tl.arange(0, GROUP)[None, :])
        y = tl.load(logits_ptr + token, mask=exists[:, None], other=float("-inf"))
        behind = places(found_ptr + 1, ordered(y), low)
        taken = (ordered(y) >= low) & (behind < GATHERED)
        tl.store(keys_ptr + behind, ordered_key(y, token), mask=taken)
    tl.debug_barrier()
    n = tl.load(found_ptr + 1, cache_modifier=".cg")
    return tl.where(groups > CHUNK, GATHERED + 1, n)


@triton.jit
def _smallest_of_sample(logits_ptr, top, stride):
    """Return the smallest finite logit of SAMPLES runs of the row, at most `top`."""
    first = tl.arange(0, SAMPLES).to(tl.int64) * (stride // 32) // SAMPLES * 32
    token = first[:, None] + tl.arange(0, 32)[None, :]
    y = tl.load(logits_ptr + token)
    return tl.min(tl.min(tl.where(y > float("-inf"), y, top), axis=1), axis=0)


@triton.jit
def _penalize(logits_ptr, largest_ptr, row, B, history_ptr, counts_ptr, length, repetition,
              presence, frequency, V):  # fmt: skip
    """Change the logits of the tokens in a row's history, and the largest of their groups.

    The tokens are distinct, so no logit is changed twice.
    """
    BLOCK: tl.constexpr = 64
    for first in tl.range(0, length, BLOCK):
        i = first + tl.arange(0, BLOCK)
        token = tl.load(history_ptr + i, mask=i < length, other=-1)
        in_vocab = (token >= 0) & (token < V)
        y = tl.load(logits_ptr + token, mask=in_vocab, other=0.0)
        times = tl.load(counts_ptr + i, mask=i < length, other=0)
        y = tl.where(y > 0.0, y / repetition, y * repetition)
        y -= frequency * times.to(tl.float32) + tl.where(times > 0, presence, 0.0)
        tl.store(logits_ptr + token, y, mask=in_vocab)
    tl.debug_barrier()
    for first in tl.range(0, length, BLOCK):
        i = first + tl.arange(0, BLOCK)
        token = tl.load(history_ptr + i, mask=i < length, other=-1)
        in_vocab = (token >= 0) & (token < V)
        group = group_of_token(token)
        members = token_of_member(0, group[:, None], tl.arange(0, GROUP)[None, :])
        y = tl.load(logits_ptr + members, mask=in_vocab[:, None], other=float("-inf"))
        # Tokens of one group write the same number.
        place = place_of_largest(group, row, B)
        tl.store(largest_ptr + place, tl.reduce(y, 1, nan_max), mask=in_vocab)
    tl.debug_barrier()
