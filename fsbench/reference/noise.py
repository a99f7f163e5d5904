"""Noise of each token, or of each group of 32 tokens, from random words.

Noise is a pure function of (seed, step, row, token or group, sample). It does not depend on the
tile shape, the batch size, the neighbors in the batch or how the vocabulary is sharded.

Token noise: one Gumbel(0, 1) per token,

    (r_0, r_1, r_2, r_3) = Philox4x32-10(key = seed, counter = (word, row, step, sample))
    g(token) = -log(E),  E = -log1p(-u),  u = (r_lane + 1/2) 2^-32

Token id <-> (word, lane) is the bijection of `word_and_lane`: the four lanes of a word are the
tokens {0, 1, 8, 9} above its first, which one thread of a tensor-core accumulator holds.

Group noise: one Gumbel and one uniform per group of 32 tokens (`group_and_member`),

    (r_0, r_1, ..) = Philox4x32-10(key = seed, counter = (group, row, step, 2^16 + sample))
    g(group) from r_0 as above,  u(group) = floor(r_1 / 2^8) 2^-24
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench.reference.philox import random_words

GUMBEL_ERROR = 4e-6
"""Bound of |g_fp32 - g|: 2.6e-6 by analysis, 1.9e-6 measured (docs/design/noise.md)."""

GROUP_STREAM = 1 << 16
"""Counter word 3 of group noise for sample 0; samples are numbered below it."""

GROUP = 32
GROUP_BLOCK = 128


def word_and_lane(token: Tensor) -> tuple[Tensor, Tensor]:
    """Return the Philox word and the lane in 0..3 of a token: bits 0 and 3 are the lane."""
    word = ((token >> 4) << 2) | ((token >> 1) & 3)
    lane = (token & 1) | ((token >> 2) & 2)
    return word, lane


def group_and_member(token: Tensor) -> tuple[Tensor, Tensor]:
    """Return the group and the member in 0..31 of a token: bits 0 and 3 to 6 are the member.

    Members are numbered in the order of their ids.
    """
    group = token // GROUP_BLOCK * 4 | ((token >> 1) & 3)
    member = ((token >> 2) & (GROUP - 2)) | (token & 1)
    return group, member


def token_of_member(group: Tensor, member: Tensor) -> Tensor:
    """Return the token of a group and member: the inverse of `group_and_member`."""
    return (group >> 2) * GROUP_BLOCK + (group & 3) * 2 + (member >> 1) * 8 + (member & 1)


def exponential(bits: Tensor) -> Tensor:
    """Return Exp(1) of 32 random bits (uint32 in int64): float64, positive, increasing."""
    return -torch.log1p(-(bits.double() + 0.5) * 2.0**-32)


def gumbel(bits: Tensor) -> Tensor:
    """Return Gumbel(0, 1) of 32 random bits (uint32 in int64): float64, finite, decreasing."""
    return -torch.log(exponential(bits))


def token_noise(V: int, seed: Tensor, offset: Tensor, rows: Tensor, sample: int = 0) -> Tensor:
    """Return the Gumbel noise of each token, float64 [B, V].

    Args:
        V: vocabulary size.
        seed, offset: int64 [1] or [B]; offset is the step (its low 32 bits are used).
        rows: int64 [B], the row's number in the batch; 0 with one seed per request.
        sample: number of the sample drawn from the same row and step, below 2^16.
    """
    words = torch.arange((V + 15) // 16 * 4, device=rows.device)
    lanes = torch.stack(random_words(words, rows, offset, sample, seed), dim=-1)
    # word_and_lane as a view: the bits of a token in its block are (lane / 2, word % 4, lane % 2).
    blocks = gumbel(lanes).view(len(rows), -1, 4, 2, 2).transpose(2, 3)
    return blocks.reshape(len(rows), 4 * len(words))[:, :V]


def group_noise(
    V: int, seed: Tensor, offset: Tensor, rows: Tensor, sample: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the Gumbel and the uniform in [0, 1) of each group, float64 [B, groups].

    Args: see `token_noise`.
    """
    groups = torch.arange(-(-V // GROUP_BLOCK) * 4, device=rows.device)
    r0, r1, _, _ = random_words(groups, rows, offset, GROUP_STREAM + sample, seed)
    return gumbel(r0), (r1 >> 8).double() * 2.0**-24
