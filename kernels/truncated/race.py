"""Device code: the race of the tokens from a cutoff on, with token noise (docs/design/noise.md)."""

import triton
import triton.language as tl

from fsbench.kernels.noise.contract import gumbel
from fsbench.kernels.noise.keys import LOWEST, LOWEST_KEY, ordered, ordered_key
from fsbench.kernels.noise.words import bits_of_tokens, first_of_word
from fsbench.kernels.truncated.cutoff import is_kept

RUN = tl.constexpr(32)
"""Neighboring tokens that race together: eight Philox words."""


@triton.jit
def load_runs(logits_ptr, chunk, V, CHUNK: tl.constexpr):
    """(logits fp32 [CHUNK, 32] of CHUNK runs, from run chunk * CHUNK on; words [CHUNK, 8])."""
    first = (tl.arange(0, CHUNK) + chunk * CHUNK)[:, None] * RUN
    token = first + tl.arange(0, RUN)[None, :]
    y = tl.load(logits_ptr + token, mask=token < V, other=float("-inf")).to(tl.float32)
    return y, first // 4 + tl.arange(0, RUN // 4)[None, :]


@triton.jit
def race(y, word, cut, T, seed, offset, row):
    """The best candidate of each Philox word, int64 [CHUNK, 8].

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
    """The logits, -inf of what is not kept."""
    return tl.where(is_kept(y, token, cut) & (ordered(y) >= LOWEST), y, float("-inf"))


@triton.jit
def _candidate(y, bits, token, T):
    """Packed candidates; LOWEST_KEY of what is not kept."""
    return tl.where(y > float("-inf"), ordered_key(y + T * gumbel(bits), token), LOWEST_KEY)


@triton.jit
def race_of_tokens(y, token, cut, T, seed, offset, row):
    """As `race`, of tokens in any order, int32 [N]: int64 [N]; a Philox call for each."""
    bits = bits_of_tokens(token, row, seed, offset)
    return _candidate(tl.where(is_kept(y, token, cut), y, float("-inf")), bits, token, T)
