"""Device code that several kernels share: the noise contract, and packed candidates.

`fsbench.reference` is the specification of the noise; the functions here are its fp32 form, in
plain Triton arithmetic (no libdevice, no inline assembly), so that every backend and the
interpreter run the same operations.
"""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**63))
"""Key of no candidate at all; every slot of a workspace rests at it between calls."""
SMALLEST_TEMPERATURE = tl.constexpr(2.0**-120)
"""Anything below is 0: its inverse, times a difference of logits, could overflow."""
LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(LOG2_E x)."""


@triton.jit
def noise_of_row(seed_ptr, offset_ptr, row, SEED_PER_ROW: tl.constexpr,
                 OFFSET_PER_ROW: tl.constexpr):  # fmt: skip
    """(seed, offset, number in the noise) of a row."""
    seed = tl.load(seed_ptr + row if SEED_PER_ROW else seed_ptr)
    offset = tl.zeros((), tl.int64)
    if offset_ptr is not None:
        offset = tl.load(offset_ptr + row if OFFSET_PER_ROW else offset_ptr)
    # A seed of its own identifies a request; else its row in the batch does.
    return seed, offset, row * 0 if SEED_PER_ROW else row


@triton.jit
def temperatures(T):
    """(T, 1 / T) as kernels use them: 0 and 1 in greedy rows, NaN for what is no temperature."""
    # NaN makes every score of the row NaN, and the row invalid.
    T = tl.where((T >= 0.0) & (float("inf") > T), T, float("nan"))
    T = tl.where(T < SMALLEST_TEMPERATURE, 0.0, T)
    # Greedy rows report the log-probabilities of T = 1.
    return T, 1.0 / tl.where(T == 0.0, 1.0, T)


@triton.jit
def halves(x):
    """[R, W] -> its left and right [R, W / 2]. It renames registers."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _log(x):
    """Natural logarithm of a positive normal fp32 x, within 2 ulp: no special cases, no table.

    x = 2^k m with m in [2/3, 4/3); log m = f + f^2 P(f), f = m - 1 (exact), P a degree-7 minimax
    polynomial with relative error 2^-27 on [-1/3, 1/3].
    """
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F2AAAAB) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    p = 0.13521721959114075 * f - 0.15410803258419037
    p = p * f + 0.14143916964530945
    p = p * f - 0.16416624188423157
    p = p * f + 0.1999768763780594
    p = p * f - 0.25007352232933044
    p = p * f + 0.33333563804626465
    p = p * f - 0.4999995529651642
    log_m = p * (f * f) + f
    # int -> float by exponent trick: conversions run at a quarter of the rate of additions.
    k_float = (k + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return k_float * 0.6931471805599453 + log_m


@triton.jit
def gumbel(bits):
    """32 random bits (uint32) -> Gumbel(0, 1) in fp32: -log(E), in [-3.13, 22.87]."""
    return -_log(exponential(bits))


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
    return tl.where(low, lost, 0.0) - _log(tl.where(low, complement, x))


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


@triton.jit
def word_candidate(score, s0, s1, s2, y0, y1, y2, y3, v0):
    """Pack the best of a word's four tokens: score is the largest of their scores s_i."""
    word = tl.arange(0, score.shape[1])
    step = tl.where(s0 == score, 0, tl.where(s1 == score, 1, tl.where(s2 == score, 8, 9)))
    logit = tl.where(s0 == score, y0, tl.where(s1 == score, y1, tl.where(s2 == score, y2, y3)))
    token = (v0 + (word >> 2) * 16 + (word & 3) * 2)[None, :] + step
    return ordered_key(tl.where(score == score, score, float("inf")), token), logit


@triton.jit
def split_words(logits):
    """[R, WIDTH] -> four [R, WIDTH // 4], by lane: the tokens first + 0, 1, 8, 9 of a word."""
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    lanes = logits.reshape(R, WIDTH // 16, 2, 4, 2).permute(0, 1, 3, 2, 4)
    even, odd = lanes.reshape(R, WIDTH // 4, 2, 2).split()  # token bit 0
    y0, y2 = even.split()  # token bit 3
    y1, y3 = odd.split()
    return y0, y1, y2, y3


@triton.jit
def random_words(v0, word, row, seed, offset, sample, zero):
    """The four random words of each Philox word from token v0 on; lane i belongs to y_i.

    zero: [R, WORDS] int32, all 0, in the layout that the result should have.
    """
    counter = ((v0 >> 4) * 4 + word)[None, :]
    return tl.philox(seed, counter + zero, row + zero, offset.to(tl.int32) + zero, zero + sample)


@triton.jit
def nan_max(a, b):
    """The larger of two, NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ordered_key(score, token):
    """Pack (score, token) into an int64 whose order is: larger score first, then lower token id.

    A NaN score must have been replaced by +inf before. token is a nonnegative int32.
    """
    score += 0.0  # -0 equals +0
    bits = score.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def take_keys(keys_ptr, at, there):
    """The keys at `at`, which are put back to rest."""
    lowest = tl.full(at.shape, LOWEST_KEY, tl.int64)
    return tl.atomic_xchg(keys_ptr + at, lowest, mask=there)


@triton.jit
def token_of_key(key):
    """The token of a packed candidate, or -1 if its row has no valid draw.

    A row is invalid if its best score is +inf (a NaN or +inf logit) or -inf (no finite logit).
    """
    ordered = (key >> 32).to(tl.int32)
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    finite = (ordered < 0x7F800000) & (ordered > -0x7F800001)
    return tl.where(finite, token, -1)
