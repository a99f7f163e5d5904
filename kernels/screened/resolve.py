"""Device code of the screened sampler's second launch: exact logits of the few that may win.

Tokens on the lists of screened.portable are computed from the weight, in the order of summation of
the fused kernels, a few at a time; all programs share all lists. A row with more tokens than its
list holds is sampled from its whole logits, again by all programs. The last program to arrive
writes the tokens and puts back to rest what the next call needs.

Over several ranks that program exchanges one word per row first, whatever became of the rows: so
each rank sends and expects B words a call, and a row that one of them computes in full only comes
later (docs/guide/multi-gpu.md).
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
from fsbench.kernels.device.rows import noise_of_rows, settings
from fsbench.kernels.noise.contract import bits_of_tokens, gumbel, temperatures
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered_key, take_keys, token_of_key
from fsbench.kernels.screened.exact_logits import (
    ask_for_rows,
    exact_logits,
    part_of_list,
    parts_of_lists,
)
from fsbench.kernels.screened.rounding import ARRIVED, CLAIMED, ROUNDED
from fsbench.kernels.screened.score_bounds import bound_of_key
from fsbench.kernels.shard.exchange import best_of_ranks


@triton.jit(do_not_specialize=["B", "V", "num_tokens", "rank"])
def resolve_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer: for rows that are computed in full
    weight,  # [>= V, D], or this rank's rows, likewise
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
    keys_ptr,  # [B] int64, at rest before and after
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
    share = own_tokens(first_token, num_tokens, V)
    if first_token is not None:  # so that a token's id finds its row
        weight_ptr -= first_token.to(tl.int64) * D
    every = tl.arange(0, POWER_B)
    number = tl.load(listed_ptr + every, mask=every < B, other=0)
    _resolve_lists(
        number, every, hidden_ptr, weight_ptr, seed_ptr, offset_ptr, temperature, soft_cap,
        bias_ptr, row_bias_ptr, mask_ptr, mask_words, lower_ptr, list_ptr, keys_ptr, found_ptr, B,
        V, D, NOISE, SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, LIST, AT_ONCE, BLOCKS, STEP,
        EVEN, IN_BULK, BY_WARPS,
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
        line = () if buffers_ptr is None else (buffers_ptr, counts_ptr, rank, area)
        _finish(
            counters_ptr, lower_ptr, listed_ptr, keys_ptr, tokens_ptr, valid_ptr, line, B, RANKS,
            WATCH,
        )  # fmt: skip


@triton.jit
def _finish(counters_ptr, lower_ptr, listed_ptr, keys_ptr, tokens_ptr, valid_ptr, line, B,
            RANKS: tl.constexpr, WATCH: tl.constexpr):  # fmt: skip
    """The last program: write the tokens, and put back to rest what the next call needs.

    line: to the other ranks, as in shard.exchange; or ().
    """
    # The lowest bound is that of a key at rest.
    for first in range(0, B, 128):
        rows = first + tl.arange(0, 128)
        there = rows < B
        key = take_keys(keys_ptr, rows, there)
        if RANKS > 1:
            key, _ = best_of_ranks(key, (), rows, there, line, RANKS, WATCH)
        token = token_of_key(key)
        tl.store(tokens_ptr + rows, token.to(tl.int64), mask=there)
        tl.store(valid_ptr + rows, token >= 0, mask=there)
        tl.store(lower_ptr + rows, tl.full((128,), LOWEST_KEY, tl.int64), mask=there)
        tl.store(listed_ptr + rows, 0, mask=there)
    tl.store(counters_ptr + CLAIMED, 0)
    tl.store(counters_ptr + ROUNDED, 0)
    tl.store(counters_ptr + ARRIVED, 0)


@triton.jit
def _resolve_lists(number, every, hidden_ptr, weight_ptr, seed_ptr, offset_ptr, temperature,
                   soft_cap, bias_ptr, row_bias_ptr, mask_ptr, mask_words, lower_ptr, list_ptr,
                   keys_ptr, found_ptr, B, V, D, NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr,
                   OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr,
                   LIST: tl.constexpr, AT_ONCE: tl.constexpr, BLOCKS: tl.constexpr,
                   STEP: tl.constexpr, EVEN: tl.constexpr, IN_BULK: tl.constexpr,
                   BY_WARPS: tl.constexpr):  # fmt: skip
    """This program's parts of the lists: exact scores of single tokens.

    number: of tokens on each list, int32 [POWER_B]; every: 0 .. POWER_B - 1.
    """
    tokens, size, parts, ends = parts_of_lists(number, LIST, 4, AT_ONCE)
    for part in range(tl.program_id(0), tl.sum(parts, 0), tl.num_programs(0)):
        b, first, last = part_of_list(part, every, tokens, size, parts, ends)
        _resolve(
            b, first, last, hidden_ptr, weight_ptr, seed_ptr, offset_ptr, temperature, soft_cap,
            bias_ptr, row_bias_ptr, mask_ptr, mask_words, lower_ptr, list_ptr, keys_ptr, found_ptr,
            B, V, D, NOISE, SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW, LIST, AT_ONCE,
            BLOCKS, STEP, EVEN, IN_BULK, BY_WARPS,
        )  # fmt: skip


@triton.jit
def _resolve(b, first, last, hidden_ptr, weight_ptr, seed_ptr, offset_ptr, temperature, soft_cap,
             bias_ptr, row_bias_ptr, mask_ptr, mask_words, lower_ptr, list_ptr, keys_ptr,
             found_ptr, B, V, D, NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr,
             OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr, LIST: tl.constexpr,
             AT_ONCE: tl.constexpr, BLOCKS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
             IN_BULK: tl.constexpr, BY_WARPS: tl.constexpr):  # fmt: skip
    """Tokens first .. last - 1 of the list of row b, at most AT_ONCE."""
    i = first + tl.arange(0, AT_ONCE)
    at = list_ptr + b.to(tl.int64) * LIST + i
    upper = tl.load(at, mask=i < last, other=0).to(tl.float32, bitcast=True)
    token = tl.load(at + B.to(tl.int64) * LIST, mask=i < last, other=0)
    # The bound has risen since some programs made their part of the list.
    below = upper < bound_of_key(tl.load(lower_ptr + b))
    known = (i < last) & (below == 0)
    # No token that does not exist is looked up, whatever is on the list.
    there = known & (token >= 0) & (token < V)
    token = tl.where(there, token, 0)
    if IN_BULK:
        ask_for_rows(weight_ptr + token.to(tl.int64) * D, there, D)
    # The noise is made while the rows are on their way.
    if NOISE == "token":
        seed, offset, row = noise_of_rows(
            seed_ptr, offset_ptr, b, None, SEED_PER_ROW, OFFSET_PER_ROW
        )
        if TEMPERATURE_PER_ROW:
            T = tl.load(temperature + b)
        else:
            T = tl.full((), temperature, tl.float32)
        T, _ = temperatures(T)
        g = T * gumbel(bits_of_tokens(token, row, seed, offset))
    y = exact_logits(
        hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, there, V, D, BLOCKS,
        STEP, EVEN, BY_WARPS,
    )  # fmt: skip
    if NOISE == "token":
        y += g
    score = tl.where(y == y, y, float("inf"))
    key = tl.where(there, ordered_key(score, token), LOWEST_KEY)
    # Whoever arrives last sees both: arriving releases what all of a program has done.
    tl.atomic_max(keys_ptr + b, tl.max(key, 0), sem="relaxed")
    tl.atomic_add(found_ptr + b, tl.sum(there.to(tl.int32), 0), sem="relaxed")


@triton.jit
def _draw_in_full(hidden, weight, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr,
                  row_bias_ptr, mask_ptr, listed_ptr, keys_ptr, found_ptr, B, V, D, mask_words,
                  share, NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr,
                  OFFSET_PER_ROW: tl.constexpr, TEMPERATURE_PER_ROW: tl.constexpr,
                  LIST: tl.constexpr, BLOCK_B: tl.constexpr,
                  BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
                  SLICE: tl.constexpr):  # fmt: skip
    """The blocks of rows with one whose list is too short: all programs share their tokens."""
    for block in range(0, tl.cdiv(B, BLOCK_B)):
        rows = block * BLOCK_B + tl.arange(0, BLOCK_B)
        listed = tl.load(listed_ptr + rows, mask=rows < B, other=0)
        if tl.max(listed, 0) > LIST:
            _whole_rows(
                hidden, weight, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr,
                row_bias_ptr, mask_ptr, keys_ptr, found_ptr, block * BLOCK_B, rows, listed > LIST,
                B, V, D, mask_words, share, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
                TEMPERATURE_PER_ROW, BLOCK_B, BLOCK_V, BLOCK_D, USE_TMA, SLICE,
            )  # fmt: skip


@triton.jit
def _whole_rows(hidden, weight, seed_ptr, offset_ptr, temperature, soft_cap, bias_ptr,
                row_bias_ptr, mask_ptr, keys_ptr, found_ptr, b0, rows, full, B, V, D,
                mask_words, share, NOISE: tl.constexpr,
                SEED_PER_ROW: tl.constexpr, OFFSET_PER_ROW: tl.constexpr,
                TEMPERATURE_PER_ROW: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_V: tl.constexpr,
                BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr, SLICE: tl.constexpr):  # fmt: skip
    """What flash_sample does for a block of rows; only those of `full` count.

    share: of own_tokens.
    """
    first, own = share
    seed, row, offset, T, inverse_temperature = settings(
        seed_ptr,
        offset_ptr,
        temperature,
        rows,
        B,
        SEED_PER_ROW,
        OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )
    WORDS: tl.constexpr = SLICE // 4
    best = tl.full((BLOCK_B, WORDS), LOWEST_KEY, tl.int64)
    best_logit = tl.zeros((BLOCK_B, WORDS), tl.float32)
    for tile_v in range(tl.program_id(0), tl.cdiv(own, BLOCK_V), tl.num_programs(0)):
        row0 = tile_v * BLOCK_V
        v0 = first + row0
        words = None
        if mask_ptr is not None:
            words = allowed_words(mask_ptr, rows, v0, B, V, mask_words, BLOCK_V)
        bias = None
        if bias_ptr is not None:
            bias = shared_bias(bias_ptr, v0, V, BLOCK_V)
        logits = tile_logits(
            hidden, weight, b0, row0, v0, B, own, D, BLOCK_B, BLOCK_V, BLOCK_D, True, USE_TMA
        )
        logits = processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words)
        best, best_logit = best_of_tile(
            logits, v0, row, seed, offset, T, inverse_temperature, 0, best,
            best_logit, 1, NOISE, TEMPERATURE_PER_ROW, False,
        )  # fmt: skip
    tl.atomic_max(keys_ptr + rows, tl.max(best, axis=1), mask=full & (rows < B))
    tl.store(found_ptr + rows, -1, mask=full & (rows < B))
