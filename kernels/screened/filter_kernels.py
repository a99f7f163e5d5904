"""Device code of filters from the screen, in four launches.

1. The portable screen without noise or records: it stores the upper bound of each logit where the
   fused kernel would store the logit, with the largest of every group of 32.
2. Lower bounds of the logits of a few tokens of each row, the leaders: tokens of different groups
   with large upper bounds. The bounds are close, as sums over the columns in another order. The kth
   largest is at most the kth largest logit, so a token whose upper bound is below it is not among
   the k largest.
3. All other tokens are put on the row's list: the candidates.
4. Exact logits of the candidates replace their upper bounds; all programs share all lists. A row
   whose list is too short gets all of its logits. Then a row has its k largest logits, and values
   below the kth elsewhere, and is filtered like stored logits.

The second and the third launch are short and wide. After a screen their code comes from memory, so
sequential work in one program costs more than parallel work in many.
"""

import triton
import triton.language as tl

from fsbench.kernels.configs.screen_choice import FILTERED_K
from fsbench.kernels.device.epilogue import allowed_words, masked, processed, shared_bias
from fsbench.kernels.device.mainloop import program_share, tile_logits, touch
from fsbench.kernels.device.rows import of_row
from fsbench.kernels.device.stored_logits import place_of_largest, store_largest, store_logits
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.group import group_of_token, token_of_member
from fsbench.kernels.noise.keys import LOWEST, ordered
from fsbench.kernels.screened.exact_logits import (
    ask_for_rows,
    exact_logits,
    part_of_list,
    parts_of_lists,
)
from fsbench.kernels.screened.leaders import close_logits
from fsbench.kernels.screened.portable import prefetch_tile, screened_logits
from fsbench.kernels.screened.rounding import CLAIMED, ROUNDED, round_claimed_rows, wait_for_rows
from fsbench.kernels.screened.score_bounds import ABSOLUTE_SLACK, CAP_SLACK, known_logits

LARGEST_K = tl.constexpr(FILTERED_K)
"""Up to this k there are more leaders than k; rows with a larger k are computed in full."""
LEADERS = tl.constexpr(128)
"""Leaders of a row, at most; no two are from the same group."""
LISTERS = tl.constexpr(32)
"""Programs of the second launch for each row, which share its leaders."""
OF_PART = tl.constexpr(LEADERS.value // LISTERS.value)
LEADERS_AT_ONCE = tl.constexpr(32)
"""Leaders that are compared with all others at once."""
GROUP = tl.constexpr(32)
"""Tokens that share one largest upper bound."""


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
    leaders_ptr,  # [B, LEADERS] fp32, out: lower bounds; -inf for a missing leader
    listed_ptr,  # [B] int32, out: 0, or LIST + 1 if the row is to be computed in full
    tokens_ptr,  # [B] int64, out: -1, no draw from all tokens
    valid_ptr,  # [B] bool, out: false; the launch that draws a row's token stores true
    V,
    D,
    stride,
    gamma,  # bounds.accumulation_error(D)
    TEMPERATURE_PER_ROW: tl.constexpr,
    TOP_K_PER_ROW: tl.constexpr,
    SHARE: tl.constexpr,  # a power of two, at least the groups of a part
    LIST: tl.constexpr,
    UNIT: tl.constexpr,  # this and what follows: as in screened.resolve
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
        tl.store(valid_ptr + row, False)
        tl.store(listed_ptr + row, tl.where(k > 0, 0, LIST + 1))
    if k > 0:
        token, exists = _leaders(
            logits_ptr + row.to(tl.int64) * stride, largest_ptr, row, part, tl.num_programs(0),
            stride, SHARE,
        )  # fmt: skip
        if IN_BULK:
            ask_for_rows(weight_ptr + token.to(tl.int64) * D, exists, D)
        y, slack = close_logits(
            hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, row, token, exists, V, D,
            gamma,
        )  # fmt: skip
        lower = y - slack
        lower = tl.where(exists & (lower == lower), lower, float("-inf"))
        tl.store(leaders_ptr + row * LEADERS + part * OF_PART + tl.arange(0, OF_PART), lower)


@triton.jit
def _k_of_row(temperature, top_k, row, TEMPERATURE_PER_ROW: tl.constexpr,
              TOP_K_PER_ROW: tl.constexpr):  # fmt: skip
    """Return how many tokens a row keeps, int32; 0 if the row is to be computed in full."""
    T, _ = temperatures(of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW))
    k = of_row(top_k, row, tl.int64 if TOP_K_PER_ROW else tl.int32, TOP_K_PER_ROW)
    k = tl.where(T > 0.0, k, 1)  # a greedy row keeps the largest, whatever its filters
    return tl.where((k > 0) & (k <= LARGEST_K), k, 0).to(tl.int32)


@triton.jit
def _leaders(logits_ptr, largest_ptr, row, part, B, stride, SHARE: tl.constexpr):
    """Return a part's leaders, int32 [OF_PART] and bool: tokens of different groups.

    Among every OF_PART-th group the one with the largest upper bound gives its best token. The low
    bits of a bound hold the group's number: among nearly equal bounds any will do.
    """
    fours = tl.cdiv(stride // 128, LISTERS)  # of groups, of a part; they load by four
    first = part * fours * 4
    number = tl.arange(0, SHARE)
    group = first + number
    end = tl.minimum((part + 1) * fours, stride // 128)
    ptrs = largest_ptr + place_of_largest(group, row, B)
    order = ordered(tl.load(ptrs, mask=group // 4 < end, other=float("-inf")))
    key = ((order & -SHARE) | number).reshape(SHARE // OF_PART, OF_PART)
    key = tl.max(key, axis=0)
    exists = key >= LOWEST  # whose low bits are 0
    group = first + (key & (SHARE - 1))
    member = tl.arange(0, GROUP)[None, :]
    ptrs = logits_ptr + token_of_member(0, group[:, None], member)
    order = ordered(tl.load(ptrs, mask=exists[:, None], other=float("-inf")))
    member = tl.max((order & -GROUP) | member, axis=1) & (GROUP - 1)
    return tl.where(exists, token_of_member(0, group, member), 0), exists


@triton.jit(do_not_specialize=["top_k", "leaders"])
def filter_candidates_kernel(
    logits_ptr,  # [B, stride] fp32: upper bounds
    largest_ptr,  # [stride // 128, B, 4] fp32; out: without the candidates
    temperature,  # this and the next: of the second launch
    top_k,
    leaders_ptr,  # [B, LEADERS] fp32
    listed_ptr,  # [B] int32; out: candidates, above LIST if the row is to be computed in full
    list_ptr,  # [B, LIST] int32, out: candidates, in any order
    leaders,  # LEADERS, as an argument: unrolled, the loop would be much code to fetch
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
        logit_ptrs = logits_ptr + row.to(tl.int64) * stride + token
        upper = tl.load(logit_ptrs, mask=block[:, None] < stride // 128, other=float("-inf"))
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

    The maximum of a group becomes that of its other tokens. A row whose list is too short is
    computed in full. number: taken tokens of each block.
    """
    N: tl.constexpr = token.shape[0]
    place = tl.atomic_add(listed_ptr, tl.sum(number), sem="relaxed") + tl.cumsum(number, 0) - number
    place = place[:, None] + tl.cumsum(taken, 1) - taken
    tl.store(list_ptr + place, token, mask=(taken != 0) & (place < LIST))
    remaining = tl.where(taken != 0, float("-inf"), upper).reshape(N, 16, 4, 2)
    remaining = tl.max(tl.max(remaining, axis=3), axis=1)
    group = block[:, None] * 4 + tl.arange(0, 4)[None, :]
    largest_ptrs = largest_ptr + place_of_largest(group, row, tl.num_programs(0))
    tl.store(largest_ptrs, remaining, mask=block[:, None] < stride // 128)


@triton.jit
def _least_of_leaders(leaders_ptr, k, leaders):
    """Return the kth largest leader of a row, as `ordered`, or LOWEST if there are fewer.

    k: int32, 1 to LARGEST_K. leaders: LEADERS.
    """
    leader = ordered(tl.load(leaders_ptr + tl.arange(0, LEADERS)))[None, :]
    reached = tl.zeros((LEADERS_AT_ONCE, LEADERS), tl.int32)
    for first in range(0, leaders, LEADERS_AT_ONCE):
        other = tl.load(leaders_ptr + first + tl.arange(0, LEADERS_AT_ONCE))
        reached += (ordered(other)[:, None] >= leader).to(tl.int32)
    reached = tl.sum(reached, axis=0)[None, :]
    return tl.maximum(tl.max(tl.where(reached >= k, leader, LOWEST)), LOWEST)


@triton.jit(do_not_specialize=["B", "V"])
def filter_screen_kernel(
    hidden_ptr,  # [B, D]
    codes_ptr,  # [blocks of rows * 2 * BLOCK_B, D] int8, scratch; see code_row
    codes,  # the same, descriptor (USE_TMA) or pointer
    copy_ptr,  # [V, D] int8
    copy,  # the same, descriptor (USE_TMA) or pointer
    scale_ptr,  # [V] fp32
    residual_ptr,  # [V] fp32
    norm_ptr,  # [V] fp32
    numbers_ptr,  # [ROW_NUMBERS, B] fp32, scratch
    soft_cap,  # fp32 or None
    bias_ptr,  # [V] or None
    row_bias_ptr,  # [B, V] or None
    mask_ptr,  # [B, mask_words] int32, or None
    counters_ptr,  # CLAIMED, ROUNDED; 0 at first, put back to it by the second launch
    found_ptr,  # [B] int32, out: 0
    logits_ptr,  # [B, stride] fp32, out: upper bounds; +inf: no bound
    largest_ptr,  # [stride // 128, B, 4] fp32, out: the largest of each group
    B,
    V,
    D,
    stride,
    gamma,  # this and the next: as in screened.portable
    norm_inflation,
    root,
    mask_words,
    UNIT: tl.constexpr,
    ROUNDED_AT_ONCE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,  # a multiple of 128
    BLOCK_D: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    NVIDIA: tl.constexpr,
    FENCED: tl.constexpr,
):
    if UNIT < 16:
        D = D // UNIT * UNIT
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    if USE_TMA and NVIDIA:
        prefetch_tile(copy_ptr, pid_v * BLOCK_V, V, D, BLOCK_V, AHEAD)
    cols = tl.arange(0, ROUNDED_AT_ONCE)
    round_claimed_rows(
        hidden_ptr, codes_ptr, numbers_ptr, found_ptr, counters_ptr, cols, B, D, gamma,
        norm_inflation, root, FENCED,
    )  # fmt: skip
    wait_for_rows(counters_ptr, B, FENCED)
    rows = pid_b * BLOCK_B + tl.arange(0, BLOCK_B)
    step = tl.load(numbers_ptr + rows, mask=rows < B, other=0.0)[:, None]
    reach = tl.load(numbers_ptr + B + rows, mask=rows < B, other=0.0)[:, None]
    spread = tl.load(numbers_ptr + 2 * B + rows, mask=rows < B, other=0.0)[:, None]
    extra = tl.full((1, 1), 2 * ABSOLUTE_SLACK, tl.float32)
    if soft_cap is not None:
        extra += soft_cap * CAP_SLACK
    bounds = (0.0, 0.0, extra, reach, spread)
    # What is absent is an empty tuple, as None cannot be in one.
    vectors = (scale_ptr, residual_ptr, norm_ptr, () if bias_ptr is None else (bias_ptr,))
    row_biases = None
    if row_bias_ptr is not None:
        row_biases = row_bias_ptr + rows.to(tl.int64)[:, None] * V
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        line = tl.minimum(v0 + tl.arange(0, BLOCK_V // 8) * 8, V - 1)
        touch(scale_ptr + line, NVIDIA)
        touch(residual_ptr + line, NVIDIA)
        touch(norm_ptr + line, NVIDIA)
        z = screened_logits(
            codes, copy, pid_b, v0, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        token = (v0 + tl.arange(0, BLOCK_V))[None, :]
        y, bound = known_logits(
            z * step, token, vectors, row_biases, rows, B, V, bounds, soft_cap
        )  # fmt: skip
        upper = y + bound
        upper = tl.where(upper == upper, upper, float("inf"))  # no bound
        if mask_ptr is not None:
            upper = masked(upper, words)
        upper = tl.where(token < V, upper, float("-inf"))
        store_logits(logits_ptr, upper, rows, v0, B, stride)
        store_largest(largest_ptr, upper, rows, v0, B, stride)


@triton.jit(do_not_specialize=["B", "V"])
def filter_resolve_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer: for rows that are computed in full
    weight,  # [>= V, D] descriptor or pointer
    hidden_ptr,  # the same as pointers: for single tokens
    weight_ptr,
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    mask_ptr,
    listed_ptr,  # [B] int32, [B, LIST] int32: of the third launch
    list_ptr,
    found_ptr,  # [B] int32, out: candidates; -1 for a row that is computed in full
    logits_ptr,  # [B, stride] fp32: upper bounds; out: logits of candidates, or of whole rows
    largest_ptr,  # [stride // 128, B, 4] fp32; out: the largest of each group as it is then
    B,
    V,
    D,
    stride,
    mask_words,
    POWER_B: tl.constexpr,  # a power of two, at least B
    LIST: tl.constexpr,
    AT_ONCE: tl.constexpr,  # this and what follows: as in screened.resolve
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    UNIT: tl.constexpr,
    EVEN: tl.constexpr,
    IN_BULK: tl.constexpr,
    BY_WARPS: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,  # a multiple of 128
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    if UNIT < 16:
        D = D // UNIT * UNIT
    every = tl.arange(0, POWER_B)
    number = tl.load(listed_ptr + every, mask=every < B, other=0)
    if tl.program_id(0) == 0:
        tl.store(found_ptr + every, tl.where(number > LIST, -1, number), mask=every < B)
    entries, size, parts, ends = parts_of_lists(number, LIST, 4, AT_ONCE)
    for part in range(tl.program_id(0), tl.sum(parts, 0), tl.num_programs(0)):
        b, first, end = part_of_list(part, every, entries, size, parts, ends)
        i = first + tl.arange(0, AT_ONCE)
        exists = i < end
        token = tl.load(list_ptr + b.to(tl.int64) * LIST + i, mask=exists, other=0)
        if IN_BULK:
            ask_for_rows(weight_ptr + token.to(tl.int64) * D, exists, D)
        y = exact_logits(
            hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, exists, V, D,
            BLOCKS, STEP, EVEN, BY_WARPS,
        )  # fmt: skip
        tl.store(logits_ptr + b.to(tl.int64) * stride + token, y, mask=exists)
        # Without a sign, so that the maximum of the bits is a NaN where there is one.
        y = tl.where(y == y, y, float("nan"))
        place = place_of_largest(group_of_token(token), b, B)
        tl.atomic_max(largest_ptr + place, y, mask=exists, sem="relaxed")
    if tl.max(number, 0) > LIST:
        for block in range(0, tl.cdiv(B, BLOCK_B)):
            rows = block * BLOCK_B + tl.arange(0, BLOCK_B)
            full = tl.load(listed_ptr + rows, mask=rows < B, other=0) > LIST
            if tl.max(full.to(tl.int32), 0) > 0:
                _store_in_full(
                    hidden, weight, soft_cap, bias_ptr, row_bias_ptr, mask_ptr, logits_ptr,
                    largest_ptr, block * BLOCK_B, rows, full, B, V, D, stride, mask_words,
                    BLOCK_B, BLOCK_V, BLOCK_D, USE_TMA,
                )  # fmt: skip


@triton.jit
def _store_in_full(hidden, weight, soft_cap, bias_ptr, row_bias_ptr, mask_ptr, logits_ptr,
                   largest_ptr, b0, rows, full, B, V, D, stride, mask_words, BLOCK_B: tl.constexpr,
                   BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
                   USE_TMA: tl.constexpr):  # fmt: skip
    """Store this program's tiles of the logits of a block's rows, only of the rows in `full`."""
    stored = tl.where(full, rows, B)  # rows from B on are not stored
    for tile_v in tl.range(tl.program_id(0), tl.cdiv(V, BLOCK_V), tl.num_programs(0)):
        v0 = tile_v * BLOCK_V
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        bias = None
        if bias_ptr is not None:
            bias = shared_bias(bias_ptr, v0, V, BLOCK_V)
        logits = tile_logits(
            hidden, weight, b0, v0, v0, B, V, D, BLOCK_B, BLOCK_V, BLOCK_D, True, USE_TMA
        )
        logits = processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words)
        store_logits(logits_ptr, logits, stored, v0, B, stride)
        store_largest(largest_ptr, logits, stored, v0, B, stride)
