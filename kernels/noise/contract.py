"""The noise contract in fp32: temperatures, Gumbel noise, token noise and its candidates.

`fsbench.reference` is the specification. The functions here use plain Triton arithmetic, without
libdevice and inline assembly, so that all backends and the interpreter run the same operations.

Four tokens, a *word*, share one Philox call: the tokens first + 0, 1, 8 and 9.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import log, nan_max
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered_key

SMALLEST_TEMPERATURE = tl.constexpr(2.0**-120)
"""Temperatures below are 0: the inverse times a difference of logits could overflow."""


@triton.jit
def temperatures(T):
    """Return (T, 1 / T): (0, 1) in greedy rows, NaN for a negative or non-finite temperature."""
    # NaN makes every score of the row NaN, and the row invalid.
    T = tl.where((T >= 0.0) & (float("inf") > T), T, float("nan"))
    T = tl.where(T < SMALLEST_TEMPERATURE, 0.0, T)
    # Greedy rows report the log-probabilities of T = 1.
    return T, 1.0 / tl.where(T == 0.0, 1.0, T)


@triton.jit
def gumbel(bits):
    """Map 32 random bits (uint32) to Gumbel(0, 1) in fp32: -log(E), in [-3.13, 22.87]."""
    return -log(exponential(bits))


@triton.jit
def exponential(bits):
    """Map 32 random bits (uint32) to Exponential(1) in fp32: -log1p(-u), u = (bits + 0.5) 2^-32.

    Both ends keep full relative precision. For u < 1/2 the part of u that is lost in rounding 1 - u
    is added back. Otherwise 1 - u is formed exactly from the complement of the bits. So the result
    has no atoms at its small end, where the winners are, and is never 0.
    """
    signed = bits.to(tl.int32, bitcast=True)
    low = signed >= 0
    x = ((signed ^ (signed >> 31)).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    complement = 1.0 - x
    lost = x - (1.0 - complement)
    return tl.where(low, lost, 0.0) - log(tl.where(low, complement, x))


@triton.jit
def candidates(logits, v0, row, seed, offset, temperature, sample, best):
    """Return the best candidate of every word under token noise, and its logit.

    A thread of a tensor-core accumulator holds all tokens of a word, so the reshapes below only
    rename its registers.

    Args:
        logits: fp32 [R, WIDTH] of tokens v0 .. v0 + WIDTH - 1; WIDTH and v0 multiples of 16.
        row: int32 [R, 1], the row in the noise.
        seed, offset: int64, scalars or [R, 1]. temperature: fp32, scalar or [R, 1]; 0 is greedy.
        sample: int32 scalar, the number of the sample.
        best: int64 [R, WIDTH // 4], the running candidates; they only order the work.

    Returns:
        (int64 [R, WIDTH // 4] packed candidates, fp32 [R, WIDTH // 4] their logits).
    """
    WORDS: tl.constexpr = logits.shape[1] // 4
    y0, y1, y2, y3 = split_words(logits)
    word = tl.arange(0, WORDS)
    # `zero` is always 0 and steers the compiler. Its first term ties the counters to the layout of
    # the logits, so that the noise is computed where it is added. Without it the noise moves
    # through shared memory (120 barriers per tile in the PTX instead of 56). The second term makes
    # a block wait for the one before (no candidate has that key), which bounds live registers.
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
    """Return the largest logit of every word as a candidate, like `candidates` without noise."""
    y0, y1, y2, y3 = split_words(logits)
    score = nan_max(nan_max(y0, y1), nan_max(y2, y3))
    return word_candidate(score, y0, y1, y2, y0, y1, y2, y3, v0)


@triton.jit
def first_of_word(v0, word):
    """Return the first token of a word, counted from token v0."""
    return v0 + (word >> 2) * 16 + (word & 3) * 2


@triton.jit
def bits_of_tokens(token, row, seed, offset):
    """Return the 32 random bits of tokens [N] in any order, for the first sample of a draw."""
    zero = token * 0
    word = ((token >> 4) << 2) | ((token >> 1) & 3)
    r0, r1, r2, r3 = tl.philox(seed, word, zero + row, zero + offset.to(tl.int32), zero)
    odd = (token & 1) != 0
    return tl.where((token & 8) != 0, tl.where(odd, r3, r2), tl.where(odd, r1, r0))


@triton.jit
def word_candidate(score, s0, s1, s2, y0, y1, y2, y3, v0):
    """Pack the best of a word's four tokens; score is the largest of their scores s_i."""
    word = tl.arange(0, score.shape[1])
    step = tl.where(s0 == score, 0, tl.where(s1 == score, 1, tl.where(s2 == score, 8, 9)))
    logit = tl.where(s0 == score, y0, tl.where(s1 == score, y1, tl.where(s2 == score, y2, y3)))
    token = first_of_word(v0, word)[None, :] + step
    return ordered_key(tl.where(score == score, score, float("inf")), token), logit


@triton.jit
def split_words(logits):
    """Split [R, WIDTH] into four [R, WIDTH // 4]: the tokens first + 0, 1, 8 and 9 of each word."""
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    lanes = logits.reshape(R, WIDTH // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
    even, odd = lanes.reshape(R, WIDTH // 4, 2, 2).split()  # token bit 0
    y0, y2 = even.split()  # token bit 3
    y1, y3 = odd.split()
    return y0, y1, y2, y3


@triton.jit
def random_words(v0, word, row, seed, offset, sample, zero):
    """Return the 32 random bits of the four tokens of each word from token v0 on.

    zero: int32 [R, WORDS], all 0, in the layout that the results should have.
    """
    counter = ((v0 >> 4) * 4 + word)[None, :]
    return tl.philox(seed, counter + zero, row + zero, offset.to(tl.int32) + zero, zero + sample)
