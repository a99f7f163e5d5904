"""Device code of the screened sampler's second launch: exact logits of the few that may win.

The logits of tokens on the lists of screened.portable are computed from the weight, in the order of
summation of the fused kernels; all programs share all lists. Long lists are shortened first
(screened.leaders). A row with more tokens than its list
holds is sampled from all its logits, by all programs. The last program to arrive writes the tokens
and resets the workspace for the next call.

With several ranks the bounds of all ranks prune the lists (screened.lower_bounds). The last program
first exchanges one word per row, also of rows that were computed in full and of rows whose list is
empty. So each rank sends and expects B words a call; a row computed in full only arrives later
(docs/guide/multi-gpu.md).
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import (
    allowed_words,
    best_of_tile,
    processed,
    shared_bias,
)
from fsbench.kernels.device.mainloop import own_tokens, tile_logits
from fsbench.kernels.device.rows import settings
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered_key, take_keys, token_of_key
from fsbench.kernels.screened.exact_logits import (
    exact_scores,
    part_of_list,
    parts_of_lists,
)
from fsbench.kernels.screened.leaders import shorten_lists
from fsbench.kernels.screened.lower_bounds import bound_of_word, local_bounds, steps_of_rows
from fsbench.kernels.screened.rounding import ARRIVED, CLAIMED, LEADING, LED, ROUNDED
from fsbench.kernels.shard.exchange import best_of_ranks


@triton.jit(do_not_specialize=["B", "V", "num_tokens", "rank", "led_from"])
def resolve_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer: for rows that are computed in full
    weight,  # [>= V, D], or this rank's rows; descriptor or pointer
    hidden_ptr,  # the same as pointers: for single tokens
    weight_ptr,
    seed_ptr,
    offset_ptr,
    temperature,
    soft_cap,
    bias_ptr,
    row_bias_ptr,
    mask_ptr,
    counters_ptr,
    lower_ptr,
    listed_ptr,
    list_ptr,
    keys_ptr,  # [B] int64, LOWEST_KEY before and after
    found_ptr,  # [B] int32: tokens recomputed; -1 where the whole row was
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    B,
    V,
    D,
    mask_words,
    first_token,  # as portable.screen_kernel
    num_tokens,
    buffers_ptr,  # this and what follows: as shard.exchange; None without other ranks
    counts_ptr,
    rank,
    area,
    gamma,  # bounds.accumulation_error(D)
    led_from,  # tokens on all lists from which the lists are shortened first; None for never
    NOISE: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    RANKS: tl.constexpr,
    WATCH: tl.constexpr,
    POWER_B: tl.constexpr,  # a power of two, at least B
    LIST: tl.constexpr,
    AT_ONCE: tl.constexpr,  # tokens computed together, at most
    BLOCKS: tl.constexpr,  # a power of two, at least the blocks of 256 columns
    STEP: tl.constexpr,  # columns of one step for single tokens; divides 256
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    SLICE: tl.constexpr,
    UNIT: tl.constexpr,  # see portable.screen_kernel
    EVEN: tl.constexpr,  # D is a multiple of 256
    IN_BULK: tl.constexpr,  # whole rows are asked for at once; see screened.exact_logits
    BY_WARPS: tl.constexpr,  # AT_ONCE is eight for each warp; see screened.exact_logits
):
    if UNIT < 16:
        D = D // UNIT * UNIT
    line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
    lower_ptr = local_bounds(lower_ptr, line)
    share = own_tokens(first_token, num_tokens, V)
    if first_token is not None:  # index by token id
        weight_ptr -= first_token.to(tl.int64) * D
    every = tl.arange(0, POWER_B)
    number = tl.load(listed_ptr + every, mask=every < B, other=0)
    request = (hidden_ptr, weight_ptr, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr,
               row_bias_ptr)  # fmt: skip
    lists = (lower_ptr, line, list_ptr)
    sizes = (B, V, D)
    if led_from is not None:  # noqa: SIM102 (one is decided at compile time)
        if tl.sum(tl.where(number > LIST, 0, number), 0) >= led_from:
            shorten_lists(
                request, lists, sizes, gamma, listed_ptr, counters_ptr, NOISE, SEED_PER_ROW,
                OFFSET_PER_ROW, TEMPERATURE_PER_ROW, RANKS, LIST, IN_BULK,
            )  # fmt: skip
            number = tl.load(listed_ptr + every, mask=every < B, other=0, volatile=True)
    _resolve_lists(
        number, every, request, lists, sizes, keys_ptr, found_ptr, NOISE, SEED_PER_ROW,
        OFFSET_PER_ROW, TEMPERATURE_PER_ROW, LIST, AT_ONCE, BLOCKS, STEP, EVEN, IN_BULK, BY_WARPS,
    )  # fmt: skip
    if tl.max(number, 0) > LIST:
        _draw_in_full(
            hidden, weight, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr, row_bias_ptr,
            mask_ptr, listed_ptr, keys_ptr, found_ptr, B, V, D, mask_words, share, NOISE,
            SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, LIST, BLOCK_B, BLOCK_V, BLOCK_D,
            USE_TMA, SLICE,
        )  # fmt: skip
    tl.debug_barrier()
    if tl.atomic_add(counters_ptr + ARRIVED, 1) == tl.num_programs(0) - 1:
        _finish(
            counters_ptr, lower_ptr, listed_ptr, keys_ptr, tokens_ptr, valid_ptr, line, B, RANKS,
            WATCH,
        )  # fmt: skip


@triton.jit
def _finish(counters_ptr, lower_ptr, listed_ptr, keys_ptr, tokens_ptr, valid_ptr, line, B,
            RANKS: tl.constexpr, WATCH: tl.constexpr):  # fmt: skip
    """Write the tokens in the last program, and reset the workspace for the next call.

    line: buffers of the exchange with other ranks (shard.exchange), or ().
    """
    for first in range(0, B, 128):
        rows = first + tl.arange(0, 128)
        in_bounds = rows < B
        key = take_keys(keys_ptr, rows, in_bounds)
        if RANKS > 1:
            key, _ = best_of_ranks(key, (), rows, in_bounds, line, RANKS, WATCH)
        token = token_of_key(key)
        tl.store(tokens_ptr + rows, token.to(tl.int64), mask=in_bounds)
        tl.store(valid_ptr + rows, token >= 0, mask=in_bounds)
        tl.store(lower_ptr + rows, tl.full((128,), LOWEST_KEY, tl.int64), mask=in_bounds)
        tl.store(listed_ptr + rows, 0, mask=in_bounds)
    tl.store(counters_ptr + CLAIMED, 0)
    tl.store(counters_ptr + ROUNDED, 0)
    tl.store(counters_ptr + ARRIVED, 0)
    tl.store(counters_ptr + LEADING, 0)
    tl.store(counters_ptr + LED, 0)


@triton.jit
def _resolve_lists(number, every, request, lists, sizes, keys_ptr, found_ptr, NOISE: tl.constexpr,
                   SEED_PER_ROW: tl.constexpr, OFFSET_PER_ROW: tl.constexpr,
                   TEMPERATURE_PER_ROW: tl.constexpr, LIST: tl.constexpr, AT_ONCE: tl.constexpr,
                   BLOCKS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
                   IN_BULK: tl.constexpr, BY_WARPS: tl.constexpr):  # fmt: skip
    """Compute exact scores of the tokens in this program's parts of the lists.

    number: of tokens on each list, int32 [POWER_B]; every: 0 .. POWER_B - 1. request, lists, sizes:
    as in leaders.shorten_lists.
    """
    lower_ptr, line, list_ptr = lists
    B, V, D = sizes
    tokens, size, parts, ends = parts_of_lists(number, LIST, 4, AT_ONCE)
    for part in range(tl.program_id(0), tl.sum(parts, 0), tl.num_programs(0)):
        b, first, last = part_of_list(part, every, tokens, size, parts, ends)
        i = first + tl.arange(0, AT_ONCE)
        list_ptrs = list_ptr + b.to(tl.int64) * LIST + i
        upper = tl.load(list_ptrs, mask=i < last, other=0).to(tl.float32, bitcast=True)
        token = tl.load(list_ptrs + B.to(tl.int64) * LIST, mask=i < last, other=0)
        # The bound has risen since some programs made their part of the list.
        word = tl.load(lower_ptr + b, volatile=True)
        below = upper < bound_of_word(word, steps_of_rows(b, b < B, line))
        listed = (i < last) & (below == 0)
        # Ids outside the vocabulary are not looked up, even if they are on the list.
        exists = listed & (token >= 0) & (token < V)
        token = tl.where(exists, token, 0)
        score = exact_scores(
            request, (V, D), b, token, exists, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
            TEMPERATURE_PER_ROW, BLOCKS, STEP, EVEN, IN_BULK, BY_WARPS,
        )  # fmt: skip
        key = tl.where(exists, ordered_key(score, token), LOWEST_KEY)
        # The last program to arrive sees both: an arrival releases all earlier writes of a program.
        tl.atomic_max(keys_ptr + b, tl.max(key, 0), sem="relaxed")
        tl.atomic_add(found_ptr + b, tl.sum(exists.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _draw_in_full(hidden, weight, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr,
                  row_bias_ptr, mask_ptr, listed_ptr, keys_ptr, found_ptr, B, V, D, mask_words,
                  share, NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr,
                  OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr,
                  LIST: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
                  BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
                  SLICE: tl.constexpr):  # fmt: skip
    """Draw the rows whose list is too short as flash_sample does; all programs share the tokens.

    share: of own_tokens.
    """
    first, shard_size = share
    WORDS: tl.constexpr = SLICE // 4
    for block in range(0, tl.cdiv(B, BLOCK_B)):
        rows = block * BLOCK_B + tl.arange(0, BLOCK_B)
        listed = tl.load(listed_ptr + rows, mask=rows < B, other=0)
        if tl.max(listed, 0) > LIST:
            full = listed > LIST
            seed, row, offset, T, inverse_temperature = settings(
                seed_ptr, offset_ptr, temperature, rows, B, SEED_PER_ROW, OFFSET_PER_ROW,
                TEMPERATURE_PER_ROW,
            )  # fmt: skip
            best = tl.full((BLOCK_B, WORDS), LOWEST_KEY, tl.int64)
            best_logit = tl.zeros((BLOCK_B, WORDS), tl.float32)
            for tile_v in range(tl.program_id(0), tl.cdiv(shard_size, BLOCK_V), tl.num_programs(0)):
                row0 = tile_v * BLOCK_V
                v0 = first + row0
                words = None
                if mask_ptr is not None:
                    words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
                bias = None
                if bias_ptr is not None:
                    bias = shared_bias(bias_ptr, v0, V, BLOCK_V)
                logits = tile_logits(
                    hidden, weight, block * BLOCK_B, row0, v0, B, shard_size, D, BLOCK_B, BLOCK_V,
                    BLOCK_D, True, USE_TMA,
                )  # fmt: skip
                logits = processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words)
                best, best_logit = best_of_tile(
                    logits, v0, row, seed, offset, T, inverse_temperature, 0, best,
                    best_logit, 1, NOISE, TEMPERATURE_PER_ROW, False,
                )  # fmt: skip
            tl.atomic_max(keys_ptr + rows, tl.max(best, axis=1), mask=full & (rows < B))
            tl.store(found_ptr + rows, -1, mask=full & (rows < B))
