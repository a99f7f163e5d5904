"""The token of each row under either form of noise, and tokens that fp32 rounding may return."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fsbench.errors import InvalidArgument
from fsbench.reference.logits import SMALLEST_TEMPERATURE, as_column
from fsbench.reference.noise import (
    GROUP,
    GROUP_BLOCK,
    GUMBEL_ERROR,
    group_noise,
    token_noise,
    token_of_member,
)
from fsbench.reference.truncation import Truncation

# Error bounds of fp32 samplers; docs/design/noise.md derives them.
_SCORE_ULP = 2.0**-23  # T, T g and the sum are each rounded once
_SUM_ERROR = 2.0**-18  # a running sum of 32 exponentials, relative to their total
_EXPONENT_ULP = 2.0**-22  # y / T, and so the relative error of its exponential


_Drawn = tuple[Tensor, Tensor, Tensor]
"""The fields of Expected."""


class Expected(NamedTuple):
    """The tokens of B rows that a sampler with noise of the contract must return.

    tokens: int64 [B]; -1 where the row has a NaN or +inf logit, or no finite one, or where its
        temperature is negative or not finite.
    acceptable: bool [B, V], tokens that fp32 rounding may return instead.
    scores: float64 [B], the score of the token. If the token is -1: -inf if no logit is finite,
        else +inf. Of several shards of a vocabulary, the token with the largest score wins.
    """

    tokens: Tensor
    acceptable: Tensor
    scores: Tensor

    def accepts(self, tokens: Tensor) -> Tensor:
        """Return whether each token is the expected or an acceptable one: bool [B]."""
        V = self.acceptable.shape[1]
        inside = (tokens >= 0) & (tokens < V)
        near = inside & self.acceptable.gather(1, tokens.long().clamp(0, V - 1)[:, None])[:, 0]
        return torch.where(self.tokens >= 0, near, tokens == -1)


def expect(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor,
    temperature: float | Tensor = 1.0,
    noise: str = "token",
    *,
    sample: int = 0,
    logits_error: float = 0.0,
    truncation: Truncation | None = None,
    find_acceptable: bool = True,
) -> Expected:
    """Return the token of each row of logits [B, V] (any float type, used exactly).

    Args:
        seed, offset: int64 [1], or [B] for one per request. With a seed per request the row's
            number does not enter the noise.
        temperature: a number, or [B]; below 2^-120 it counts as 0, which is greedy.
        noise: "token" or "group".
        sample: number of the sample from the same row and step.
        logits_error: bound on the difference between the sampler's logits and these.
        truncation: of these logits, with the same temperature and logits_error; only kept tokens
            are drawn. With token noise, the best score of the kept tokens; with group noise, the
            draw from all tokens if it is kept, else the draw with token noise.
        find_acceptable: if False, the field `acceptable` is undefined, and a draw with group noise
            and without truncation takes half the time.
    """
    if noise not in ("token", "group"):
        raise InvalidArgument(f"noise: expected token or group; got {noise!r}")
    B = logits.shape[0]
    exact = logits.double()
    rows = torch.arange(B, device=logits.device) * (seed.numel() == 1)
    T = as_column(temperature, logits.device)[:, 0].expand(B)
    undefined = torch.isnan(logits) | (logits == torch.inf)
    has_finite = torch.isfinite(logits).any(1)
    valid_temperature = (T >= 0) & (torch.inf > T)
    invalid = undefined.any(1) | ~has_finite | ~valid_temperature
    if truncation is not None:
        invalid |= ~truncation.kept.any(1)
    T = torch.where(T < SMALLEST_TEMPERATURE, 0.0, T)
    exact = torch.where(undefined | invalid[:, None], -torch.inf, exact)
    T = torch.where(invalid, 1.0, T)[:, None]
    arguments = (exact, T, seed, offset, rows, sample, logits_error)
    if noise == "token":
        drawn = _token_draw(*arguments, truncation)
    else:
        find = find_acceptable or truncation is not None
        drawn = _group_draw(*arguments, find)
        if truncation is not None:
            drawn = _either(drawn, _token_draw(*arguments, truncation), truncation)
    tokens, acceptable, scores = drawn
    empty = ~(undefined.any(1) | has_finite) & valid_temperature
    scores = torch.where(empty, -torch.inf, torch.where(invalid, torch.inf, scores))
    return Expected(torch.where(invalid, -1, tokens), acceptable, scores)


def _token_draw(
    logits: Tensor,
    T: Tensor,
    seed: Tensor,
    offset: Tensor,
    rows: Tensor,
    sample: int,
    error: float,
    truncation: Truncation | None = None,
) -> _Drawn:
    """Draw argmax(logits + T g), the lowest id of equal scores (Gumbel-max, section 3.1)."""
    scores = logits + T * token_noise(logits.shape[1], seed, offset, rows, sample)
    surely = possibly = scores
    if truncation is not None:
        scores, surely, possibly = (scores.masked_fill(~part, -torch.inf) for part in truncation)
    best = scores.max(1, keepdim=True).values
    # Scores are sums of two terms; the larger term determines the rounding.
    magnitude = _finite(best).abs() + 23.0 * T
    tolerance = 2 * (T * GUMBEL_ERROR + magnitude * _SCORE_ULP + error)
    # The best of the tokens that every rounding keeps is a lower bound.
    least = surely.max(1, keepdim=True).values - tolerance
    return scores.argmax(1), (possibly >= least) & torch.isfinite(possibly), best[:, 0]


def _group_draw(
    logits: Tensor,
    T: Tensor,
    seed: Tensor,
    offset: Tensor,
    rows: Tensor,
    sample: int,
    error: float,
    find_acceptable: bool,
) -> _Drawn:
    """Draw the group with the largest T (L + g), L its log-mass at T, then a member by u.

    Group-Gumbel-Max (Lemmas D.1, D.2). u selects the first member whose running sum of exp(y / T)
    exceeds u times the sum of the group. At T = 0: the first member with the largest logit.
    """
    V = logits.shape[1]
    g, u = group_noise(V, seed, offset, rows, sample)
    y = _by_group(logits)
    T = T[:, :, None]
    largest = y.max(2, keepdim=True).values
    p = torch.exp((y - _finite(largest)) / torch.where(T == 0, 1.0, T))
    sums = p.cumsum(2)
    log_mass = torch.log(sums[:, :, -1])
    score = torch.where(
        torch.isfinite(largest), largest + T * (log_mass + g)[:, :, None], -torch.inf
    )
    best = score.amax(1, keepdim=True)
    threshold = (u * sums[:, :, -1])[:, :, None]

    winner = score.argmax(1, keepdim=True)  # [B, 1, 1]
    hit = _rows_of(sums, winner) > _rows_of(threshold, winner)
    group, member = winner[:, 0, 0], hit.int().argmax(1)
    token = token_of_member(group, member)
    token = torch.where(T[:, 0, 0] == 0, logits.argmax(1), token)
    if not find_acceptable:
        return token, torch.empty_like(token[:, None], dtype=torch.bool), best[:, 0, 0]

    magnitude = _finite(best).abs() + 27.0 * T
    tolerance = 2 * (T * (GUMBEL_ERROR + _SUM_ERROR) + magnitude * 2 * _EXPONENT_ULP + error)
    near_group = score >= best - tolerance
    scale = torch.where(T == 0, 1.0, T)
    slack = _SUM_ERROR + (_finite(largest).abs() * _EXPONENT_ULP + 2 * error) / scale
    slack = slack * sums[:, :, -1:]
    near_hit = (sums + slack > threshold) & (sums - p - slack <= threshold)
    # exp underflows in fp32 at -104, and members without mass are never selected.
    near_hit &= y >= largest - tolerance - 104.0 * T
    near_hit = torch.where(T == 0, y >= largest - tolerance, near_hit)
    acceptable = near_group & near_hit & torch.isfinite(y)
    return token, _by_token(acceptable, V), best[:, 0, 0]


def _rows_of(grouped: Tensor, group: Tensor) -> Tensor:
    """Select one group of each row: [B, groups, n] -> [B, n]; group: int64 [B, 1, 1]."""
    return grouped.gather(1, group.expand(-1, 1, grouped.shape[2]))[:, 0]


def _either(from_all: _Drawn, from_kept: _Drawn, truncation: Truncation) -> _Drawn:
    """Return the draw from all tokens if it is kept, else the draw from the kept tokens.

    The result is distributed over the kept tokens, of mass Z: p_v + (1 - Z) p_v / Z = p_v / Z.
    """
    tokens, near, scores = from_all
    kept_tokens, kept_near, kept_scores = from_kept
    is_kept = truncation.kept.gather(1, tokens[:, None])[:, 0]
    may_be_cut = (near & ~truncation.surely).any(1, keepdim=True)
    return (
        torch.where(is_kept, tokens, kept_tokens),
        (near & truncation.possibly) | (kept_near & may_be_cut),
        torch.where(is_kept, scores, kept_scores),
    )


def _by_group(values: Tensor) -> Tensor:
    """[B, V] -> [B, groups, 32]; -inf for tokens beyond V."""
    B, V = values.shape
    padded = pad(values, (0, -V % GROUP_BLOCK), value=-torch.inf)
    # group_and_member as a view: the bits of a token are (member / 2, group % 4, member % 2).
    return padded.view(B, -1, GROUP // 2, 4, 2).transpose(2, 3).reshape(B, -1, GROUP)


def _by_token(grouped: Tensor, V: int) -> Tensor:
    """[B, groups, 32] -> [B, V]."""
    B = len(grouped)
    return grouped.reshape(B, -1, 4, GROUP // 2, 2).transpose(2, 3).reshape(B, -1)[:, :V]


def _finite(values: Tensor) -> Tensor:
    """Replace -inf by the lowest finite number."""
    return values.clamp_min(torch.finfo(values.dtype).min)
