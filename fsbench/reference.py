"""The oracle: the noise contract in its plainest form, and the token each sampler must return.

This module is the specification (docs/noise.md explains it). Everything is integer arithmetic or
float64 in torch, so it runs on any device and can be read line by line.

Token noise: one Gumbel(0, 1) variate per (seed, step, row, token), a pure function of these. It
does not depend on the tile shape, the batch size, the neighbours in the batch or how the
vocabulary is sharded:

    (r_0, r_1, r_2, r_3) = Philox4x32-10(key = seed, counter = (word, row, step, sample))
    g(token) = -log(E),  E = -log1p(-u),  u = (r_lane + 1/2) 2^-32

Token id <-> (word, lane) is the bijection of `word_and_lane`: the four lanes of a word are the
tokens {0, 1, 8, 9} above its first, which one thread of a tensor-core accumulator holds.
The sampled token is argmax(logits + T g), the lowest id if several are equal (Gumbel-max,
FlashSampling section 3.1, scaled by T so that T = 0 is greedy).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF

# The bounds below are what fp32 samplers are held to; docs/noise.md derives them.
GUMBEL_ERROR = 4e-6  # |g_fp32 - g|: 2.6e-6 by analysis, 1.9e-6 seen
_SCORE_ULP = 2.0**-23  # T, T g and the sum are each rounded once


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b; b int64 holding uint32 values."""
    low_part = (a & 0xFFFF) * b
    high = ((a >> 16) * b + (low_part >> 16)) >> 16
    return high, (a * b) & _MASK32


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 (Salmon et al., SC'11). All tensors int64 holding uint32 values, broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = _mulhilo(0xD2511F53, c0)
        high1, low1 = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return c0, c1, c2, c3


def word_and_lane(token: Tensor) -> tuple[Tensor, Tensor]:
    """Token id -> (Philox word, lane in 0..3): bits 0 and 3 of the id are the lane."""
    word = ((token >> 4) << 2) | ((token >> 1) & 3)
    lane = (token & 1) | ((token >> 2) & 2)
    return word, lane


def gumbel(bits: Tensor) -> Tensor:
    """32 random bits (int64 holding uint32) -> Gumbel(0, 1): float64, finite, decreasing."""
    u = (bits.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u))


def token_noise(V: int, seed: Tensor, offset: Tensor, rows: Tensor, sample: int = 0) -> Tensor:
    """Gumbel noise of every token, [len(rows), V] float64.

    Args:
        V: vocabulary size.
        seed, offset: int64 [1] or scalar; offset is the step (its low 32 bits are used).
        rows: int64 [B], the row's number in the batch.
        sample: number of the sample drawn from the same row and step, below 2^32.
    """
    device = rows.device
    words = torch.arange((V + 15) // 16 * 4, device=device)[None, :]
    seed, offset = seed.to(device).reshape(()), offset.to(device).reshape(())
    key = (seed & _MASK32, (seed >> 32) & _MASK32)
    counter = (words, rows[:, None], offset & _MASK32, torch.tensor(sample, device=device))
    lanes = torch.stack(torch.broadcast_tensors(*philox4x32(counter, key)), dim=-1)
    word, lane = word_and_lane(torch.arange(V, device=device))
    return gumbel(lanes[:, word, lane])


class Expected(NamedTuple):
    """What a token-noise sampler must return for each of B rows.

    tokens: int64 [B]; -1 where the row has a NaN or +inf logit, or no finite one.
    scores: float64 [B, V], logits + T g.
    tolerance: float64 [B]: two scores closer than this may be swapped by fp32 rounding.
    """

    tokens: Tensor
    scores: Tensor
    tolerance: Tensor

    def accepts(self, tokens: Tensor) -> Tensor:
        """bool [B]: the token is the expected one, or its score is within tolerance of the best."""
        valid = self.tokens >= 0
        inside = (tokens >= 0) & (tokens < self.scores.shape[1])
        picked = self.scores.gather(1, tokens.long().clamp(0, self.scores.shape[1] - 1)[:, None])[
            :, 0
        ]
        best = self.scores.gather(1, self.tokens.clamp_min(0)[:, None])[:, 0]
        near = inside & (picked >= best - self.tolerance)
        return torch.where(valid, near, tokens == -1)


def sample_token_noise(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor,
    temperature: float = 1.0,
    *,
    logits_error: float = 0.0,
) -> Expected:
    """The token of every row of logits [B, V] (any float type, used exactly) with token noise.

    logits_error bounds how far the sampler's own logits may be from these (0: the very same).
    """
    rows = torch.arange(logits.shape[0], device=logits.device)
    exact = logits.double()
    scores = exact
    if temperature > 0:
        scores = exact + temperature * token_noise(logits.shape[1], seed, offset, rows)
    undefined = torch.isnan(exact) | (exact == torch.inf)
    invalid = undefined.any(1) | ~torch.isfinite(exact).any(1)
    scores = torch.where(undefined, -torch.inf, scores)
    tokens = torch.where(invalid, -1, scores.argmax(1))
    best = scores.max(1).values.clamp_min(torch.finfo(torch.float64).min)
    # Of the two sums behind the best score, the larger term sets the rounding.
    magnitude = best.abs() + 23.0 * temperature
    tolerance = 2 * (temperature * GUMBEL_ERROR + magnitude * _SCORE_ULP + logits_error)
    return Expected(tokens, scores, tolerance)


def matmul_error(hidden: Tensor, weight: Tensor) -> float:
    """How far fp32-accumulated logits of hidden [B, D], weight [V, D] may be apart: an estimate.

    Each of two summation orders is within D 2^-24 sum |h w| of the exact value; that sum is at
    most |h|_2 |w|_2, and rounding errors of either sign make sqrt(D) the realistic growth. Four
    times that is used: far below any spacing that a wrong kernel would produce.
    """
    D = hidden.shape[1]
    rows = [torch.nan_to_num(m.float(), 0.0, 0.0, 0.0).norm(dim=1).max() for m in (hidden, weight)]
    return 4.0 * D**0.5 * 2.0**-24 * float(rows[0] * rows[1])
