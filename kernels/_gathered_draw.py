"""Device code: one program gathers logits of a row, as keys (_cutoff.py), and draws from them.

Up to RANKED are ranked, up to GATHERED searched in registers; with more it reads the row again.
"""

import triton
import triton.language as tl

from fsbench.kernels._cutoff import (
    GATHERED,
    NOTHING,
    RANKED,
    cut_by_ranks,
    cut_in_registers,
    cut_of_row,
    first_key,
    load_keys,
    ordered,
    packed_weights,
    unpacked,
)
from fsbench.kernels._helper import ordered_key, split_words, token_of_key
from fsbench.kernels._kept_race import RUN, load_runs, race, race_of_tokens

SCANNED = tl.constexpr(2048)
"""Tokens that are read at once of a row with more of them."""

CHUNK = tl.constexpr(128)
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
def draw_of_gathered(logits_ptr, keys_ptr, n, low, k, p, by_p, least, valid, top, sharpness, T,
                     seed, offset, row, V):  # fmt: skip
    """The token of a row, -1 if it is not valid: top-k, then top-p, then nothing below `least`.

    Args:
        keys_ptr: int64 [GATHERED], the keys of all n tokens from `low`, a key, on; if n is above
            GATHERED they are not read.
        least: the lowest key that may be kept.
        sharpness: log2(e) over the temperature at which top-p acts; T: that of the draw.
    """
    high = first_key(ordered(top) + 1)
    winner = tl.full((), -1, tl.int32)
    if valid:
        if n <= RANKED:
            winner = _draw_in_registers(
                keys_ptr, n, low, high, k, p, by_p, least, top, sharpness, T, seed, offset, row,
                RANKED,
            )  # fmt: skip
        elif n <= GATHERED:
            winner = _draw_in_registers(
                keys_ptr, n, low, high, k, p, by_p, least, top, sharpness, T, seed, offset, row,
                GATHERED,
            )  # fmt: skip
        else:
            cut = cut_of_row(logits_ptr, V, low, high, k, p, by_p, top, sharpness, SCANNED)
            cut = tl.maximum(cut, least)
            logits, word = load_runs(logits_ptr, 0, V, CHUNK)
            best, _kept = race(split_words(logits), word, cut, T, seed, offset, row)
            for chunk in tl.range(1, tl.cdiv(V, CHUNK * RUN)):
                logits, word = load_runs(logits_ptr, chunk, V, CHUNK)
                more, _kept = race(split_words(logits), word, cut, T, seed, offset, row)
                best = tl.maximum(best, more)
            winner = token_of_key(tl.max(tl.max(best, axis=1), axis=0))
    return winner


@triton.jit
def _draw_in_registers(keys_ptr, n, low, high, k, p, by_p, least, top, sharpness, T, seed, offset,
                       row, N: tl.constexpr):  # fmt: skip
    """The token of a row from n keys, at most N."""
    keys = load_keys(keys_ptr, 0, n, N)
    y, token = unpacked(keys)
    if N <= RANKED:
        cut = cut_by_ranks(keys, keys_ptr, n, k, p, by_p, top, sharpness)
    else:
        weights = packed_weights(y, keys > NOTHING, top, sharpness)
        cut = cut_in_registers(keys, weights, low, high, k, p, by_p)
    cut = tl.maximum(cut, least)
    return token_of_key(tl.max(race_of_tokens(y, token, cut, T, seed, offset, row)))
