"""The noise contract as kernels compute it: temperatures, Gumbel noise, candidates of a tile.

`fsbench.reference` is the specification of the noise; the functions here are its fp32 form, in
plain Triton arithmetic (no libdevice, no inline assembly), so that every backend and the
interpreter run the same operations.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import log, nan_max
from fsbench.kernels.noise.keys import LOWEST_KEY
from fsbench.kernels.noise.words import random_words, split_words, word_candidate

SMALLEST_TEMPERATURE = tl.constexpr(2.0**-120)
"""Anything below is 0: its inverse, times a difference of logits, could overflow."""


@triton.jit
def temperatures(T):
    """(T, 1 / T) as kernels use them: 0 and 1 in greedy rows, NaN for what is no temperature."""
    # NaN makes every score of the row NaN, and the row invalid.
    T = tl.where((T >= 0.0) & (float("inf") > T), T, float("nan"))
    T = tl.where(T < SMALLEST_TEMPERATURE, 0.0, T)
    # Greedy rows report the log-probabilities of T = 1.
    return T, 1.0 / tl.where(T == 0.0, 1.0, T)


@triton.jit
def gumbel(bits):
    """32 random bits (uint32) -> Gumbel(0, 1) in fp32: -log(E), in [-3.13, 22.87]."""
    return -log(exponential(bits))


@triton.jit
def exponential(bits):
    """32 random bits (uint32) -> E ~ Exponential(1) in fp32: -log1p(-u), u = (bits + 0.5) 2^-32.

    Both ends keep full relative precision: for u < 1/2 the part of u lost in rounding 1 - u is
    added back, otherwise 1 - u is formed from the complement of bits without any loss. So E has no
    atoms at its small end, where the winners are, and is never 0.
    """
    signed = bits.to(tl.int32, bitcast=True)
    low = signed >= 0
    x = ((signed ^ (signed >> 31)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = 1.0 - x
    lost = x - (1.0 - complement)
    return tl.where(low, lost, 0.0) - log(tl.where(low, complement, x))


@triton.jit
def candidates(logits, v0, row, seed, offset, temperature, sample, best):
    """The best candidate of every Philox word under token noise, and its logit.

    Args:
        logits: [R, WIDTH] fp32, of tokens v0 .. v0 + WIDTH - 1; WIDTH and v0 multiples of 16.
        row: [R, 1] int32, the row's number in the batch (it enters the noise).
        seed, offset: int64, scalars or [R, 1]. temperature: fp32, likewise; 0 is greedy.
        sample: int32 scalar, the number of the sample.
        best: [R, WIDTH // 4] int64, the candidates so far; they only order the work.

    Returns:
        ([R, WIDTH // 4] int64 packed candidates, [R, WIDTH // 4] fp32 their logits).

    One Philox call serves the four tokens of a word (first + 0, 1, 8, 9), which a thread of a
    tensor-core accumulator holds already: the reshapes below only rename its registers.
    """
    WORDS: tl.constexpr = logits.shape[1] // 4
    y0, y1, y2, y3 = split_words(logits)
    word = tl.arange(0, WORDS)
    # `zero` is always 0, and steers the compiler. The first term ties the counters to the layout
    # of the logits, so that the noise is computed where it is added; without it each lane's noise
    # moves through shared memory (120 barriers per tile in the PTX against 56). The second makes a
    # block wait for the one before (no candidate has that key), which bounds live registers.
    zero = ((y0 < float("-inf")) | (best == LOWEST_KEY + 1)).to(tl.int32)
    r0, r1, r2, r3 = random_words(v0, word, row, seed, offset, sample, zero)
    s0 = y0 + temperature * gumbel(r0)
    s1 = y1 + temperature * gumbel(r1)
    s2 = y2 + temperature * gumbel(r2)
    s3 = y3 + temperature * gumbel(r3)
    score = nan_max(nan_max(s0, s1), nan_max(s2, s3))
    key, logit = word_candidate(score, s0, s1, s2, y0, y1, y2, y3, v0)
    return key, logit


@triton.jit
def greedy_candidates(logits, v0):
    """As candidates, without noise: the largest logit of every word."""
    y0, y1, y2, y3 = split_words(logits)
    score = nan_max(nan_max(y0, y1), nan_max(y2, y3))
    return word_candidate(score, y0, y1, y2, y0, y1, y2, y3, v0)
