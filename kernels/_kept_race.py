"""Device code: the race of the tokens from a cutoff on, with token noise (docs/noise.md)."""

import triton
import triton.language as tl

from fsbench.kernels._cutoff import LOWEST, is_kept, ordered
from fsbench.kernels._helper import LOWEST_KEY, gumbel, ordered_key, split_words
from fsbench.kernels._stored_logits import RUN


@triton.jit
def load_runs(logits_ptr, found_ptr, chunk, n, V, CHUNK: tl.constexpr):
    """(logits fp32 [CHUNK, 32] of a chunk of n runs, first token of each run [CHUNK, 1]).

    found_ptr: the numbers of the runs, or None if they are 0, 1, ...
    """
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    run = at
    if found_ptr is not None:
        run = tl.load(found_ptr + at, mask=at < n, other=0)
    first = (run * RUN)[:, None]
    token = first + tl.arange(0, RUN)[None, :]
    there = (at < n)[:, None] & (token < V)
    y = tl.load(logits_ptr + token, mask=there, other=float("-inf"))
    return y.to(tl.float32), first


@triton.jit
def race(y, first, cut, T, seed, offset, row):
    """The best candidate of each Philox word of a chunk, int64 [CHUNK, 8], and its kept tokens.

    These are counted in int32 [CHUNK, 8].

    y, first: of load_runs. Only tokens from the cutoff on race; their scores are those of
    `candidates` (kernels/_helper.py).
    """
    CHUNK: tl.constexpr = y.shape[0]
    token = first + tl.arange(0, RUN)[None, :]
    kept = is_kept(y, token, cut) & (ordered(y) >= LOWEST)
    y0, y1, y2, y3 = split_words(tl.where(kept, y, float("-inf")))
    many = (y0 > float("-inf")).to(tl.int32) + (y1 > float("-inf")).to(tl.int32)
    many += (y2 > float("-inf")).to(tl.int32) + (y3 > float("-inf")).to(tl.int32)
    word = tl.arange(0, RUN // 4)[None, :]
    counter = first // 4 + word  # four words for 16 tokens
    # Always 0; ties the counters to the layout of the logits, as in `candidates`.
    zero = (y0 < float("-inf")).to(tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, counter + zero, row + zero, offset.to(tl.int32) + zero, zero)
    token = first + (word >> 2) * 16 + (word & 3) * 2
    best = tl.full((CHUNK, RUN // 4), LOWEST_KEY, tl.int64)
    best = tl.maximum(best, _candidate(y0, r0, token, T))
    best = tl.maximum(best, _candidate(y1, r1, token + 1, T))
    best = tl.maximum(best, _candidate(y2, r2, token + 8, T))
    return tl.maximum(best, _candidate(y3, r3, token + 9, T)), many


@triton.jit
def _candidate(y, bits, token, T):
    """Packed candidates; LOWEST_KEY of what is not kept."""
    return tl.where(y > float("-inf"), ordered_key(y + T * gumbel(bits), token), LOWEST_KEY)


@triton.jit
def race_of_tokens(y, token, cut, T, seed, offset, row):
    """As `race`, of tokens in any order, int32 [N]: int64 [N]; a Philox call for each."""
    zero = token * 0
    word = ((token >> 4) << 2) | ((token >> 1) & 3)
    r0, r1, r2, r3 = tl.philox(seed, word, zero + row, zero + offset.to(tl.int32), zero)
    odd = (token & 1) != 0
    bits = tl.where((token & 8) != 0, tl.where(odd, r3, r2), tl.where(odd, r1, r0))
    return _candidate(tl.where(is_kept(y, token, cut), y, float("-inf")), bits, token, T)
