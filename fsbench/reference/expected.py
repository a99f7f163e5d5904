"""The token of every row under either form of noise, and what fp32 rounding may make of it."""

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

# The bounds below are what fp32 samplers are held to; docs/design/noise.md derives them.
_SCORE_ULP = 2.0**-23  # T, T g and the sum are each rounded once
_SUM_ERROR = 2.0**-18  # of a running sum of 32 exponentials, relative to the whole
_EXPONENT_ULP = 2.0**-22  # of y / T, which moves an exponential by as much


_Drawn = tuple[Tensor, Tensor, Tensor]
"""The fields of Expected."""


class Expected(NamedTuple):
    """What a sampler with noise of the contract must return for each of B rows.

    tokens: int64 [B]; -1 where the row has a NaN or +inf logit, or no finite one, or where its
        temperature is negative or not finite.
    acceptable: bool [B, V]: tokens that fp32 rounding may have put in their place.
    scores: float64 [B]: the best score, that of the token; where that is -1, -inf if no logit is
        finite, else +inf. The best of several shards of a vocabulary is the one of larger score.
    """

    tokens: Tensor
    acceptable: Tensor
    scores: Tensor

    def accepts(self, tokens: Tensor) -> Tensor:
        """bool [B]: the token is the expected one, or an acceptable one."""
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
    """The token of every row of logits [B, V] (any float type, used exactly), at T = 0 greedy.

    Args:
        seed, offset: int64 [1], or [B] for one per request. With a seed per request the row's
            number does not enter the noise.
        temperature: a number, or [B]; below 2^-120 it counts as 0.
        noise: "token" or "group".
        sample: number of the sample from the same row and step.
        logits_error: how far the sampler's own logits may be from these (0: the very same).
        truncation: of these logits, with the same temperature and logits_error: only what it keeps
            is drawn. With token noise, the best score among the kept; with group noise, the draw
            from all tokens if it is kept, else what token noise draws.
        find_acceptable: with False the field `acceptable` is undefined, and a draw with group noise
            and without truncation takes half of the time.
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
    """argmax(logits + T g), the lowest id if several are equal (Gumbel-max, section 3.1)."""
    scores = logits + T * token_noise(logits.shape[1], seed, offset, rows, sample)
    surely = possibly = scores
    if truncation is not None:
        scores, surely, possibly = (scores.masked_fill(~part, -torch.inf) for part in truncation)
    best = scores.max(1, keepdim=True).values
    # Of the two sums behind the best score, the larger term sets the rounding.
    magnitude = _finite(best).abs() + 23.0 * T
    tolerance = 2 * (T * GUMBEL_ERROR + magnitude * _SCORE_ULP + error)
    # Whatever rounding keeps, the best of what is surely kept is among it.
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
    """The group of largest T (L + g), L its log-mass at T, then the member that u falls on.

    Group-Gumbel-Max (Lemmas D.1, D.2). u falls on the first member whose running sum of
    exp(y / T) exceeds u times the group's. At T = 0: the first member of largest logit.
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
    # exp underflows in fp32 at -104, and what has no mass is never hit.
    near_hit &= y >= largest - tolerance - 104.0 * T
    near_hit = torch.where(T == 0, y >= largest - tolerance, near_hit)
    acceptable = near_group & near_hit & torch.isfinite(y)
    return token, _by_token(acceptable, V), best[:, 0, 0]


def _rows_of(grouped: Tensor, group: Tensor) -> Tensor:
    """[B, groups, n] -> [B, n], the numbers of one group of each row; group: int64 [B, 1, 1]."""
    return grouped.gather(1, group.expand(-1, 1, grouped.shape[2]))[:, 0]


def _either(first: _Drawn, second: _Drawn, truncation: Truncation) -> _Drawn:
    """The draw from all tokens where it is kept, else the draw from the kept.

    The law is that of the kept: with mass Z, p_v + (1 - Z) p_v / Z = p_v / Z.
    """
    tokens, near, scores = first
    other_tokens, other_near, other_scores = second
    stands = truncation.kept.gather(1, tokens[:, None])[:, 0]
    may_be_cut = (near & ~truncation.surely).any(1, keepdim=True)
    return (
        torch.where(stands, tokens, other_tokens),
        (near & truncation.possibly) | (other_near & may_be_cut),
        torch.where(stands, scores, other_scores),
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
    """values, with the lowest finite number for -inf."""
    return values.clamp_min(torch.finfo(values.dtype).min)
