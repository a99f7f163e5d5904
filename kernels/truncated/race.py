"""Device code: draw among the kept tokens with token noise (docs/design/noise.md).

`draw_of_gathered` draws a row's token in one program. It compares up to RANKED gathered tokens with
each other and searches up to GATHERED in registers. With more tokens it reads the row again.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.contract import bits_of_tokens, first_of_word, gumbel, split_words
from fsbench.kernels.noise.keys import LOWEST, LOWEST_KEY, ordered, ordered_key, token_of_key
from fsbench.kernels.truncated.cutoff import (
    FEW_RANKED,
    GATHERED,
    NOTHING,
    RANKED,
    cut_by_ranks,
    cut_in_registers,
    cut_of_row,
    first_key,
    is_kept,
    load_keys,
    packed_weights,
    unpacked,
)

RUN = tl.constexpr(32)
"""Neighboring tokens that race together: eight Philox words."""


@triton.jit
def load_runs(logits_ptr, chunk, V, CHUNK: tl.constexpr):
    """Load CHUNK runs from run chunk * CHUNK on: (logits fp32 [CHUNK, 32], words [CHUNK, 8])."""
    first = (tl.arange(0, CHUNK) + chunk * CHUNK)[:, None] * RUN
    token = first + tl.arange(0, RUN)[None, :]
    y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
    return y, first // 4 + tl.arange(0, RUN // 4)[None, :]


@triton.jit
def race(y, word, cut, T, seed, offset, row):
    """Return the best candidate of each Philox word, int64 [CHUNK, 8].

    Args:
        y: four tensors [CHUNK, 8], the logits of a word's tokens, by lane. word: its number,
            int32 [CHUNK, 8].
        cut: tokens from this key on race; their scores are those of `candidates`.
    """
    token = first_of_word(0, word)
    y0 = _racing(y[0], token, cut)
    y1 = _racing(y[1], token + 1, cut)
    y2 = _racing(y[2], token + 8, cut)
    y3 = _racing(y[3], token + 9, cut)
    # Always 0; ties the counters to the layout of the logits, as in `candidates`.
    zero = (y0 < float("-inf")).to(tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, word + zero, row + zero, offset.to(tl.int32) + zero, zero)
    best = _candidate(y0, r0, token, T)
    best = tl.maximum(best, _candidate(y1, r1, token + 1, T))
    best = tl.maximum(best, _candidate(y2, r2, token + 8, T))
    return tl.maximum(best, _candidate(y3, r3, token + 9, T))


@triton.jit
def _racing(y, token, cut):
    """Return the logits of kept tokens, -inf for the others."""
    return tl.where(is_kept(y, token, cut) & (ordered(y) >= LOWEST), y, float("-inf"))


@triton.jit
def _candidate(y, bits, token, T):
    """Pack scores and tokens; LOWEST_KEY where the logit is -inf."""
    return tl.where(y > float("-inf"), ordered_key(y + T * gumbel(bits), token), LOWEST_KEY)


@triton.jit
def race_of_tokens(y, token, cut, T, seed, offset, row):
    """Return the candidates int64 [N] of tokens int32 [N] in any order, one Philox call each."""
    bits = bits_of_tokens(token, row, seed, offset)
    return _candidate(tl.where(is_kept(y, token, cut), y, float("-inf")), bits, token, T)


GATHERED_AT_ONCE = tl.constexpr(2048)
"""Tokens read at once of a row with more than GATHERED."""

RUNS_AT_ONCE = tl.constexpr(128)
"""Runs that race at once in a row with more than GATHERED tokens."""


@triton.jit
def append(keys_ptr, n, y, token, low):
    """Append the keys of the logits from `low` (`ordered`, int32) on to n keys; return the count.

    Keys beyond GATHERED are counted and not stored.
    """
    taken = ordered(y) >= low
    place = n + tl.cumsum(taken.to(tl.int32), axis=0) - 1
    tl.store(keys_ptr + place, ordered_key(y, token), mask=taken & (place < GATHERED))
    return n + tl.sum(taken.to(tl.int32))


@triton.jit
def draw_of_gathered(logits_ptr, keys_ptr, n, low, drawn, k, p, by_p, least, valid, top, sharpness,
                     T, seed, offset, row, V):  # fmt: skip
    """Return draw_of_few for any n; the token is -1 if the row is not valid.

    If n is above GATHERED, the row's logits are read instead of keys_ptr.
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
    """Return (the token of a row, its cutoff: the lowest key that is kept).

    Top-k is applied first, then top-p, and no key below `least` is kept.

    Args:
        keys_ptr: int64, the keys of all n tokens from `low`, a key, on; n is at most GATHERED.
        drawn: the key of a draw from all tokens, which is returned if it is kept; or LOWEST_KEY.
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
    """Return draw_of_few for at most N keys."""
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
