"""Device code: one program draws from a row of stored logits, among those it has gathered."""

import triton
import triton.language as tl

from fsbench.kernels._cutoff import (
    GATHERED,
    cut_in_registers,
    cut_of_row,
    first_key,
    ordered,
    packed_weights,
)
from fsbench.kernels._helper import ordered_key, split_words, token_of_key
from fsbench.kernels._kept_race import RUN, load_runs, race, race_of_tokens

SCANNED = tl.constexpr(2048)
"""Tokens that are read at once of a row with more of them."""

CHUNK = tl.constexpr(128)
"""Runs of such a row that race at once."""


@triton.jit
def gather(logits_ptr, low, values_ptr, ids_ptr, V, BLOCK: tl.constexpr):
    """Put the logits from `low` on, int32 as `ordered`, and their tokens in order; how many.

    What is beyond GATHERED of them is counted only.
    """
    n = tl.zeros((), tl.int32)
    for first in tl.range(0, V, BLOCK):
        token = first + tl.arange(0, BLOCK)
        y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
        taken = ordered(y) >= low
        at = n + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        n += tl.sum(taken.to(tl.int32))
        taken = taken & (at < GATHERED)
        tl.store(values_ptr + at, y, mask=taken)
        tl.store(ids_ptr + at, token, mask=taken)
    tl.debug_barrier()
    return n


@triton.jit
def draw_of_gathered(logits_ptr, values_ptr, ids_ptr, n, low, k, p, by_p, least, valid, top,
                     sharpness, T, seed, offset, row, V):  # fmt: skip
    """The token of a row, -1 if it is not valid: top-k, then top-p, then nothing below `least`.

    Args:
        values_ptr, ids_ptr, n: of `gather`: all tokens from `low`, a key, on.
        least: the lowest key that may be kept.
        sharpness: log2(e) over the temperature at which top-p acts; T: that of the draw.
    """
    high = first_key(ordered(top) + 1)
    place = tl.arange(0, GATHERED)
    y = tl.load(values_ptr + place, mask=place < n, other=float("-inf"))
    token = tl.load(ids_ptr + place, mask=place < n, other=0)
    cut = low
    winner = tl.full((), -1, tl.int32)
    if valid:
        if n > GATHERED:
            cut = cut_of_row(logits_ptr, V, low, high, k, p, by_p, top, sharpness, SCANNED)
            cut = tl.maximum(cut, least)
            logits, word = load_runs(logits_ptr, 0, V, CHUNK)
            best, _kept = race(split_words(logits), word, cut, T, seed, offset, row)
            for chunk in tl.range(1, tl.cdiv(V, CHUNK * RUN)):
                logits, word = load_runs(logits_ptr, chunk, V, CHUNK)
                more, _kept = race(split_words(logits), word, cut, T, seed, offset, row)
                best = tl.maximum(best, more)
            winner = token_of_key(tl.max(tl.max(best, axis=1), axis=0))
        else:
            weights = packed_weights(y, place < n, top, sharpness)
            cut = cut_in_registers(ordered_key(y, token), weights, low, high, k, p, by_p)
            cut = tl.maximum(cut, least)
            winner = token_of_key(tl.max(race_of_tokens(y, token, cut, T, seed, offset, row)))
    return winner
