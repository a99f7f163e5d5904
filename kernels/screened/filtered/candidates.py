"""Device code of filters from the screen, second and third launch: which logits must be exact.

The second computes a few exact logits of each row, of tokens of different groups with large upper
bounds: the leaders. The kth largest of them is at most the kth largest of all logits, so a token
whose upper bound is below that can be none of the k largest. The third puts all others on the row's
list: the candidates.

Both are short and wide. After a screen their code comes from memory, so what one program does in
sequence costs more than what many do at once.
"""

import triton
import triton.language as tl

from fsbench.kernels.configs.screen_choice import FILTERED_K
from fsbench.kernels.device.rows import of_row
from fsbench.kernels.device.stored_logits import place_of_largest
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.group import token_of_member
from fsbench.kernels.noise.keys import LOWEST, ordered
from fsbench.kernels.screened.exact import ask_for_rows, exact_logits
from fsbench.kernels.screened.rounding import CLAIMED, ROUNDED

LARGEST_K = tl.constexpr(FILTERED_K)
"""Up to this k there are more leaders than k; rows with a larger one are computed in full."""

LEADERS = tl.constexpr(128)
"""Of a row, at most; each is of a part of the groups of its own."""

LISTERS = tl.constexpr(8)
"""Programs of the second launch for each row. They share its leaders."""

OF_PART = tl.constexpr(LEADERS.value // LISTERS.value)

LEADERS_AT_ONCE = tl.constexpr(32)
"""Leaders that all others are held against at once."""

GROUP = tl.constexpr(32)
"""Tokens of which the largest upper bound is known."""


@triton.jit(do_not_specialize=["top_k", "V"])
def filter_leaders_kernel(
    hidden_ptr,  # [B, D]
    weight_ptr,  # [>= V, D]
    logits_ptr,  # [B, stride] fp32: upper bounds
    largest_ptr,  # [stride // 128, B, 4] fp32
    temperature,  # fp32, or pointer to [B] fp32
    top_k,  # int32, or pointer to [B] int32 or int64
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    counters_ptr,  # CLAIMED, ROUNDED; out: 0
    leaders_ptr,  # [B, LEADERS] fp32, out: exact logits; -inf where there is none
    listed_ptr,  # [B] int32, out: 0, or LIST + 1 if the row is to be computed in full
    tokens_ptr,  # [B] int64, out: -1, as there is no draw from all tokens
    valid_ptr,  # [B] bool, out: true; later launches store false for a row without a draw
    V,
    D,
    stride,
    TEMPERATURE_PER_ROW: tl.constexpr,
    TOP_K_PER_ROW: tl.constexpr,
    SHARE: tl.constexpr,  # a power of two, at least the groups of a part
    LIST: tl.constexpr,
    AT_ONCE: tl.constexpr,  # a multiple of OF_PART; this and what follows: as in screened.resolve
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    IN_BULK: tl.constexpr,
):
    if UNIT < 16:
        D = D // UNIT * UNIT
    row = tl.program_id(0)
    part = tl.program_id(1)
    k = _k_of_row(temperature, top_k, row, TEMPERATURE_PER_ROW, TOP_K_PER_ROW)
    if part == 0:
        if row == 0:
            tl.store(counters_ptr + CLAIMED, 0)
            tl.store(counters_ptr + ROUNDED, 0)
        tl.store(tokens_ptr + row, tl.full((), -1, tl.int64))
        # A race of truncated.narrow stores a token alone: after a draw from all tokens its row is
        # valid already.
        tl.store(valid_ptr + row, True)
        tl.store(listed_ptr + row, tl.where(k > 0, 0, LIST + 1))
    if k > 0:
        token, there = _leaders(
            logits_ptr + row.to(tl.int64) * stride, largest_ptr, row, part, tl.num_programs(0),
            stride, SHARE,
        )  # fmt: skip
        # The tile is as high as that of the candidates, for the same instruction.
        i = tl.arange(0, AT_ONCE)
        token = _repeated(token, AT_ONCE)
        there = (_repeated(there.to(tl.int32), AT_ONCE) != 0) & (i < OF_PART)
        if IN_BULK:
            ask_for_rows(weight_ptr + token.to(tl.int64) * D, there, D)
        y = exact_logits(
            hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, row, token, there, V, D,
            BLOCKS, STEP, EVEN, False,
        )  # fmt: skip
        y = tl.where(there & (y == y), y, float("-inf"))
        tl.store(leaders_ptr + row * LEADERS + part * OF_PART + i, y, mask=i < OF_PART)


@triton.jit
def _k_of_row(temperature, top_k, row, TEMPERATURE_PER_ROW: tl.constexpr,
              TOP_K_PER_ROW: tl.constexpr):  # fmt: skip
    """How many tokens a row keeps, int32; 0 if it is to be computed in full."""
    T, _ = temperatures(of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW))
    k = of_row(top_k, row, tl.int64 if TOP_K_PER_ROW else tl.int32, TOP_K_PER_ROW)
    k = tl.where(T > 0.0, k, 1)  # a greedy row keeps the largest, whatever its filters
    return tl.where((k > 0) & (k <= LARGEST_K), k, 0).to(tl.int32)


@triton.jit
def _leaders(logits_ptr, largest_ptr, row, part, B, stride, SHARE: tl.constexpr):
    """A part's leaders, int32 [OF_PART] and bool: tokens of different groups, 0 where none is.

    Of every OF_PART-th group of the part it takes the one with the largest upper bound, and of that
    the token. Low bits of a bound make room for the number of what it is the bound of: with nearly
    equal ones it does not matter which is taken.
    """
    fours = tl.cdiv(stride // 128, LISTERS)  # of groups, of a part; they load by four
    first = part * fours * 4
    number = tl.arange(0, SHARE)
    group = first + number
    end = tl.minimum((part + 1) * fours, stride // 128)
    at = largest_ptr + place_of_largest(group, row, B)
    order = ordered(tl.load(at, mask=group // 4 < end, other=float("-inf")))
    key = ((order & -SHARE) | number).reshape(SHARE // OF_PART, OF_PART)
    key = tl.max(key, axis=0)
    there = key >= LOWEST  # whose low bits are 0
    group = first + (key & (SHARE - 1))
    member = tl.arange(0, GROUP)[None, :]
    at = logits_ptr + token_of_member(0, group[:, None], member)
    order = ordered(tl.load(at, mask=there[:, None], other=float("-inf")))
    member = tl.max((order & -GROUP) | member, axis=1) & (GROUP - 1)
    return tl.where(there, token_of_member(0, group, member), 0), there


@triton.jit
def _repeated(x, TIMES_LENGTH: tl.constexpr):
    """x [N] again and again: [TIMES_LENGTH], a multiple of N."""
    N: tl.constexpr = x.shape[0]
    return tl.broadcast_to(x[None, :], (TIMES_LENGTH // N, N)).reshape(TIMES_LENGTH)


@triton.jit(do_not_specialize=["top_k", "leaders"])
def filter_candidates_kernel(
    logits_ptr,  # [B, stride] fp32: upper bounds
    largest_ptr,  # [stride // 128, B, 4] fp32; out: without the candidates
    temperature,  # this and the next: of the second launch
    top_k,
    leaders_ptr,  # [B, LEADERS] fp32
    listed_ptr,  # [B] int32; out: candidates, above LIST if the row is to be computed in full
    list_ptr,  # [B, LIST] int32, out: candidates, in any order
    leaders,  # LEADERS, which the compiler shall not know: unrolled, the loop is much code to fetch
    stride,
    TEMPERATURE_PER_ROW: tl.constexpr,
    TOP_K_PER_ROW: tl.constexpr,
    LIST: tl.constexpr,
    TILE: tl.constexpr,  # tokens of a program, a multiple of 128
):
    row = tl.program_id(0)
    tile = tl.program_id(1)
    k = _k_of_row(temperature, top_k, row, TEMPERATURE_PER_ROW, TOP_K_PER_ROW)
    if k > 0:
        # Blocks of 128 tokens, each with four groups.
        block = tile * (TILE // 128) + tl.arange(0, TILE // 128)
        token = block[:, None] * 128 + tl.arange(0, 128)[None, :]
        at = logits_ptr + row.to(tl.int64) * stride + token
        upper = tl.load(at, mask=block[:, None] < stride // 128, other=float("-inf"))
        least = _least_of_leaders(leaders_ptr + row * LEADERS, k, leaders)
        taken = (ordered(upper) >= least).to(tl.int32)
        number = tl.sum(taken, axis=1)
        if tl.max(number) > 0:
            _list(
                token, upper, taken, number, block, listed_ptr + row,
                list_ptr + row.to(tl.int64) * LIST, largest_ptr, row, stride, LIST,
            )  # fmt: skip


@triton.jit
def _list(token, upper, taken, number, block, listed_ptr, list_ptr, largest_ptr, row, stride,
          LIST: tl.constexpr):  # fmt: skip
    """Put the tokens [N, 128] of blocks [N] that are `taken` on their row's list.

    The largest of their groups becomes that of the others. If the list is too short, the row is
    computed in full, so what becomes of it does not matter.

    number: of those that are taken of each block.
    """
    N: tl.constexpr = token.shape[0]
    place = tl.atomic_add(listed_ptr, tl.sum(number), sem="relaxed") + tl.cumsum(number, 0) - number
    place = place[:, None] + tl.cumsum(taken, 1) - taken
    tl.store(list_ptr + place, token, mask=(taken != 0) & (place < LIST))
    rest = tl.where(taken != 0, float("-inf"), upper).reshape(N, 16, 4, 2)
    rest = tl.max(tl.max(rest, axis=3), axis=1)
    group = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = largest_ptr + place_of_largest(group, row, tl.num_programs(0))
    tl.store(at, rest, mask=block[:, None] < stride // 128)


@triton.jit
def _least_of_leaders(leaders_ptr, k, leaders):
    """The kth largest of a row's leaders, as `ordered`. k: int32, 1 to LARGEST_K; leaders: LEADERS.

    LOWEST, which all finite logits reach, if fewer than k are above -inf.
    """
    leader = ordered(tl.load(leaders_ptr + tl.arange(0, LEADERS)))[None, :]
    reached = tl.zeros((LEADERS_AT_ONCE, LEADERS), tl.int32)
    for first in range(0, leaders, LEADERS_AT_ONCE):
        other = tl.load(leaders_ptr + first + tl.arange(0, LEADERS_AT_ONCE))
        reached += (ordered(other)[:, None] >= leader).to(tl.int32)
    reached = tl.sum(reached, axis=0)[None, :]
    return tl.maximum(tl.max(tl.where(reached >= k, leader, LOWEST)), LOWEST)
