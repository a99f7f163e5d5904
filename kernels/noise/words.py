"""Words of token noise: four tokens that share one Philox call, and where a tile has them."""

import triton
import triton.language as tl

from fsbench.kernels.noise.keys import ordered_key


@triton.jit
def first_of_word(v0, word):
    """The first token of a Philox word, counted from token v0; the others are 1, 8 and 9 on."""
    return v0 + (word >> 2) * 16 + (word & 3) * 2


@triton.jit
def bits_of_tokens(token, row, seed, offset):
    """The 32 random bits of tokens in any order, int32 [N], for the first sample of a draw."""
    zero = token * 0
    word = ((token >> 4) << 2) | ((token >> 1) & 3)
    r0, r1, r2, r3 = tl.philox(seed, word, zero + row, zero + offset.to(tl.int32), zero)
    odd = (token & 1) != 0
    return tl.where((token & 8) != 0, tl.where(odd, r3, r2), tl.where(odd, r1, r0))


@triton.jit
def word_candidate(score, s0, s1, s2, y0, y1, y2, y3, v0):
    """Pack the best of a word's four tokens: score is the largest of their scores s_i."""
    word = tl.arange(0, score.shape[1])
    step = tl.where(s0 == score, 0, tl.where(s1 == score, 1, tl.where(s2 == score, 8, 9)))
    logit = tl.where(s0 == score, y0, tl.where(s1 == score, y1, tl.where(s2 == score, y2, y3)))
    token = first_of_word(v0, word)[None, :] + step
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
