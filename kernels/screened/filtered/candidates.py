"""Device code of filters from the screen, second launch: which logits must be exact.

One program for each row. Of the groups with the largest upper bounds it computes one exact logit
each, that of the token with the largest bound: the leaders. They are tokens of different groups, so
the kth largest of them is at most the kth largest of all logits, and a token whose upper bound is
below that can be none of the k largest. All others are candidates and go on the row's list.
"""

import triton
import triton.language as tl

from fsbench.kernels.configs.screen import FILTERED_K
from fsbench.kernels.device.reaching import places, reached_by
from fsbench.kernels.device.rows import of_row
from fsbench.kernels.device.stored_logits import place_of_largest
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.group import token_of_member
from fsbench.kernels.noise.keys import LOWEST, ordered, ordered_key
from fsbench.kernels.screened.exact import exact_logits
from fsbench.kernels.screened.rounding import CLAIMED, ROUNDED

LEADERS = tl.constexpr(128)
"""Room for leaders. At least 64, for the instruction that the fused kernels use on Hopper."""

SOUGHT = tl.constexpr(112)
"""Leaders that are asked for at most; with an eighth more they fit."""

LARGEST_K = tl.constexpr(FILTERED_K)
"""Up to this k there are more leaders than k; rows with a larger one are computed in full."""

GROUP = tl.constexpr(32)
"""Tokens of which the largest upper bound is known."""

HEADER = tl.constexpr(32)
"""Numbers before a row's groups: two counters, and the rest of their line of 128 bytes."""

AT_ONCE = tl.constexpr(64)
"""Groups whose tokens are looked at together."""


@triton.jit(do_not_specialize=["top_k", "V"])
def filter_candidates_kernel(
    hidden_ptr,  # [B, D]
    weight_ptr,  # [>= V, D]
    logits_ptr,  # [B, stride] fp32: upper bounds
    largest_ptr,  # [stride // 128, B, 4] fp32; out: without the candidates
    temperature,  # fp32, or pointer to [B] fp32
    top_k,  # int32, or pointer to [B] int32 or int64
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    counters_ptr,  # CLAIMED, ROUNDED; out: 0
    groups_ptr,  # [B, HEADER + stride // 32] int32, scratch
    listed_ptr,  # [B] int32, out: candidates, above LIST if the row is to be computed in full
    list_ptr,  # [B, LIST] int32, out: candidates, in any order
    found_ptr,  # [B] int32, out: candidates; -1 if the row is to be computed in full
    tokens_ptr,  # [B] int64, out: -1, as there is no draw from all tokens
    V,
    D,
    stride,
    TEMPERATURE_PER_ROW: tl.constexpr,
    TOP_K_PER_ROW: tl.constexpr,
    GROUPS: tl.constexpr,  # a power of two, at least stride // 32
    LIST: tl.constexpr,
    BLOCKS: tl.constexpr,  # this and what follows: as in screened.resolve
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
    IN_BULK: tl.constexpr,
):
    row = tl.program_id(0)
    B = tl.num_programs(0)
    if row == 0:
        tl.store(counters_ptr + CLAIMED, 0)
        tl.store(counters_ptr + ROUNDED, 0)
    tl.store(tokens_ptr + row, tl.full((), -1, tl.int64))
    T, _ = temperatures(of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW))
    k = of_row(top_k, row, tl.int64 if TOP_K_PER_ROW else tl.int32, TOP_K_PER_ROW)
    k = tl.where(T > 0.0, k, 1)  # a greedy row keeps the largest, whatever its filters
    listed = tl.full((), LIST + 1, tl.int32)
    if (k > 0) & (k <= LARGEST_K):
        logits_ptr += row.to(tl.int64) * stride
        groups_ptr += row.to(tl.int64) * (HEADER + stride // GROUP)
        tl.store(groups_ptr + tl.arange(0, 2), tl.zeros((2,), tl.int32))
        group = tl.arange(0, GROUPS)
        groups = stride // 128 * 4  # in this form a known multiple of 4, so they load by four
        at = largest_ptr + place_of_largest(group, row, B)
        order = ordered(tl.load(at, mask=group < groups, other=float("-inf")))
        tl.debug_barrier()
        least = _least_of_leaders(
            hidden_ptr, weight_ptr, logits_ptr, order, k.to(tl.int32), soft_cap, bias_ptr,
            row_bias_ptr, groups_ptr, row, V, D, BLOCKS, STEP, EVEN, IN_BULK,
        )  # fmt: skip
        listed = _list_candidates(
            logits_ptr, largest_ptr, order, least, groups_ptr, list_ptr + row.to(tl.int64) * LIST,
            row, B, LIST,
        )  # fmt: skip
    tl.store(listed_ptr + row, listed)
    tl.store(found_ptr + row, tl.where(listed > LIST, -1, listed))


@triton.jit
def _least_of_leaders(hidden_ptr, weight_ptr, logits_ptr, order, k, soft_cap, bias_ptr,
                      row_bias_ptr, groups_ptr, row, V, D, BLOCKS: tl.constexpr,
                      STEP: tl.constexpr, EVEN: tl.constexpr, IN_BULK: tl.constexpr):  # fmt: skip
    """A number that at least k logits of different groups reach, and few more: as `order`.

    LOWEST, which all finite logits reach, if there are fewer than k.

    order: `ordered` of the groups' largest upper bounds, int32 [GROUPS]. k: 1 to LARGEST_K.
    """
    sought = tl.minimum(2 * k + 16, SOUGHT)
    low = tl.full((), LOWEST, tl.int32)
    low = reached_by(order, sought, low, tl.max(order) + 1)
    place = places(groups_ptr, order, low)
    group = tl.arange(0, order.shape[0])
    tl.store(groups_ptr + HEADER + place, group, mask=(order >= low) & (place < LEADERS))
    tl.debug_barrier()
    at = tl.arange(0, LEADERS)
    there = at < tl.load(groups_ptr, cache_modifier=".cg")
    group = tl.load(groups_ptr + HEADER + at, mask=there, other=0, cache_modifier=".cg")
    member = token_of_member(0, group[:, None], tl.arange(0, GROUP)[None, :])
    upper = tl.load(logits_ptr + member, mask=there[:, None], other=float("-inf"))
    key = tl.max(ordered_key(upper, member), axis=1)
    token = tl.where(there, 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32), 0)
    y = exact_logits(
        hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, row, token, there, V, D, BLOCKS,
        STEP, EVEN, IN_BULK,
    )  # fmt: skip
    leader = ordered(tl.where(there & (y == y), y, float("-inf")))
    low = reached_by(leader, k, tl.full((), LOWEST, tl.int32), tl.max(leader) + 1)
    enough = tl.sum((leader >= low).to(tl.int32)) >= k
    # The smallest that reaches it, as it may lie anywhere above the next.
    return tl.where(enough, tl.min(tl.where(leader >= low, leader, 0x7FFFFFFF)), LOWEST)


@triton.jit
def _list_candidates(logits_ptr, largest_ptr, order, least, groups_ptr, list_ptr, row, B,
                     LIST: tl.constexpr):  # fmt: skip
    """Put the tokens whose upper bound is `least` or more on the list; how many there are.

    The largest of their groups becomes that of the others. If they are more than LIST, which stays
    true of what is returned, some are not looked at.
    """
    place = places(groups_ptr + 1, order, least)
    tl.debug_barrier()  # warps may still read the leaders' groups
    tl.store(groups_ptr + HEADER + place, tl.arange(0, order.shape[0]), mask=order >= least)
    tl.debug_barrier()
    groups = tl.load(groups_ptr + 1, cache_modifier=".cg")
    listed = tl.zeros((), tl.int32)
    first = tl.zeros((), tl.int32)
    while (first < groups) & (listed <= LIST):
        at = first + tl.arange(0, AT_ONCE)
        there = at < groups
        group = tl.load(groups_ptr + HEADER + at, mask=there, other=0, cache_modifier=".cg")
        token = token_of_member(0, group[:, None], tl.arange(0, GROUP)[None, :])
        upper = tl.load(logits_ptr + token, mask=there[:, None], other=float("-inf"))
        taken = (ordered(upper) >= least).to(tl.int32)
        number = tl.sum(taken, axis=1)
        to = (listed + tl.cumsum(number, 0) - number)[:, None] + tl.cumsum(taken, 1) - taken
        tl.store(list_ptr + to, token, mask=(taken != 0) & (to < LIST))
        rest = tl.max(tl.where(taken != 0, float("-inf"), upper), axis=1)
        tl.store(largest_ptr + place_of_largest(group, row, B), rest, mask=there)
        listed += tl.sum(number, 0)
        first += AT_ONCE
    return listed
