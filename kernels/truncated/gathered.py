"""Device code: one program gathers logits of a row, as keys, and draws from them.

Up to RANKED are ranked, up to GATHERED searched in registers; with more it reads the row again.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.keys import LOWEST_KEY, ordered, ordered_key, token_of_key
from fsbench.kernels.noise.words import split_words
from fsbench.kernels.truncated.cutoff import (
    FEW_RANKED,
    GATHERED,
    NOTHING,
    RANKED,
    cut_by_ranks,
    cut_in_registers,
    cut_of_row,
    first_key,
    load_keys,
    packed_weights,
    unpacked,
)
from fsbench.kernels.truncated.race import RUN, load_runs, race, race_of_tokens

GATHERED_AT_ONCE = tl.constexpr(2048)
"""Tokens that are read at once of a row with more of them."""

RUNS_AT_ONCE = tl.constexpr(128)
"""Runs of such a row that race at once."""


@triton.jit
def append(keys_ptr, n, y, token, low):
    """Put the keys of the logits from `low` on, int32 as `ordered`, behind the n that are there.

    Returns how many there are then; what is beyond GATHERED of them is counted only.
    """
    taken = ordered(y) >= low
    at = n + tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(keys_ptr + at, ordered_key(y, token), mask=taken & (at < GATHERED))
    return n + tl.sum(taken.to(tl.int32))


@triton.jit
def draw_of_gathered(logits_ptr, keys_ptr, n, low, drawn, k, p, by_p, least, valid, top, sharpness,
                     T, seed, offset, row, V):  # fmt: skip
    """As draw_of_few, for any n; the token is -1 if the row is not valid.

    If n is above GATHERED, nothing at keys_ptr is read, but all logits of the row.
    """
    winner = tl.full((), -1, tl.int32)
    cut = least
    if valid:
        if n <= GATHERED:
            winner, cut = draw_of_few(
                keys_ptr, n, low, drawn, k, p, by_p, least, top, sharpness, T, seed, offset, row
            )
        else:
            high = first_key(ordered(top) + 1)
            cut = cut_of_row(logits_ptr, V, low, high, k, p, by_p, top, sharpness, GATHERED_AT_ONCE)
            cut = tl.maximum(cut, least)
            winner = token_of_key(drawn)
            if drawn < cut:
                best = tl.full((RUNS_AT_ONCE, RUN // 4), LOWEST_KEY, tl.int64)
                for chunk in tl.range(0, tl.cdiv(V, RUNS_AT_ONCE * RUN)):
                    logits, word = load_runs(logits_ptr, chunk, V, RUNS_AT_ONCE)
                    more = race(split_words(logits), word, cut, T, seed, offset, row)
                    best = tl.maximum(best, more)
                winner = token_of_key(tl.max(tl.max(best, axis=1), axis=0))
    return winner, cut


@triton.jit
def draw_of_few(
    keys_ptr, n, low, drawn, k, p, by_p, least, top, sharpness, T, seed, offset, row
):  # fmt: skip
    """(the token of a row, the key from which on its tokens are kept).

    The filters are top-k, then top-p, then nothing below `least`.

    Args:
        keys_ptr: int64, the keys of all n tokens from `low`, a key, on; n is at most GATHERED.
        drawn: the key of a draw from all tokens, which stands if it is kept; or LOWEST_KEY.
        least: the lowest key that may be kept.
        sharpness: log2(e) over the temperature at which top-p acts; T: that of the draw.
    """
    if n <= FEW_RANKED:
        winner, cut = _draw_in_registers(
            keys_ptr, n, low, drawn, k, p, by_p, least, top, sharpness, T, seed, offset, row,
            FEW_RANKED,
        )  # fmt: skip
    elif n <= RANKED:
        winner, cut = _draw_in_registers(
            keys_ptr, n, low, drawn, k, p, by_p, least, top, sharpness, T, seed, offset, row,
            RANKED,
        )  # fmt: skip
    else:
        winner, cut = _draw_in_registers(
            keys_ptr, n, low, drawn, k, p, by_p, least, top, sharpness, T, seed, offset, row,
            GATHERED,
        )  # fmt: skip
    return winner, cut


@triton.jit
def _draw_in_registers(keys_ptr, n, low, drawn, k, p, by_p, least, top, sharpness, T, seed, offset,
                       row, N: tl.constexpr):  # fmt: skip
    """As draw_of_few, of at most N keys."""
    keys = load_keys(keys_ptr, 0, n, N)
    y, token = unpacked(keys)
    if N <= RANKED:
        cut = cut_by_ranks(keys, keys_ptr, n, k, p, by_p, top, sharpness)
    else:
        weights = packed_weights(y, keys > NOTHING, top, sharpness)
        high = first_key(ordered(top) + 1)
        cut = cut_in_registers(keys, weights, low, high, k, p, by_p)
    cut = tl.maximum(cut, least)
    winner = token_of_key(drawn)
    if drawn < cut:
        winner = token_of_key(tl.max(race_of_tokens(y, token, cut, T, seed, offset, row)))
    return winner, cut
