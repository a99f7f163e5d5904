"""Truncated sampling: penalties on tokens seen before, and which tokens the filters keep.

Every filter keeps the first tokens of one order: larger logits first, of equal logits the lower
token id. So what all of them keep together is the beginning of that order, too.

    top_k   the first k
    min_p   those whose probability is at least min_p times the largest
    top_p   the fewest of the first whose probabilities sum to p or more, p as it is given: a
            number in float64, a tensor in its own dtype. What is within 2^-22 p of p counts as p
            (REACHED)

Probabilities are those of what earlier filters left, normalized anew, at the temperature if that
was applied earlier, else at T = 1. The order is a property of a sampler (ORDER is fsbench's
own): top-p after top-k counts p of the mass of the k tokens, before it ("joint") of all. Whatever
the order, at least one token is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.reference.logits import SMALLEST_TEMPERATURE, as_column

ORDER = ("temperature", "min_p", "top_k", "top_p")
"""The order of fsbench's own samplers (problem.FILTER_ORDER)."""
MASS_ERROR = 2.0**-16
"""Error of a sum of exponentials in fp32 that a sampler may have, in units of the whole."""

REACHED = 1 - 2.0**-22
"""The part of p that counts as p, so that rounding of logits, and of p, adds no token where masses
sum to p exactly: .5 and .3 reach .8, and three of five equal ones .6."""

_RATIO_ERROR = 2.0**-19  # of log(p / largest p), beside the rounding of the logits themselves
_LOGIT_ULP = 2.0**-22


class Truncation(NamedTuple):
    """What the filters keep of every row: bool [B, V] each; nothing of a row without a draw.

    kept: in exact arithmetic, of exactly these logits.
    surely, possibly: what is kept, and what may be, for any rounding of the sums in fp32 and of the
        logits within `logits_error`. Equal for top-k alone on exact logits.
    """

    kept: Tensor
    surely: Tensor
    possibly: Tensor


def truncate(
    logits: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    order: Sequence[str] = ORDER,
    keeps_ties: bool = False,
    logits_error: float = 0.0,
) -> Truncation:
    """Which tokens of logits [B, V] (any float type, used exactly) the filters keep.

    Args:
        temperature: a number, or [B]; a row at T = 0 keeps the first token alone.
        top_k, top_p, min_p: numbers, or [B]. Off at 0 or below, 1 or above, 0 or below; a top_p of
            0 or below and a min_p above 1 keep as little as they can. NaN: the row has no draw.
        order: of "temperature" and the filters. keeps_ties: see Capabilities.
        logits_error: how far a sampler's logits may be from these.
    """
    z = logits.double()
    V = z.shape[1]
    rows = _Rows(z, temperature, top_k, top_p, min_p)
    ranked = rows.logits.sort(dim=1, descending=True, stable=True)
    place = torch.arange(V, device=z.device)
    found = []
    for sign in (0, -1, 1):
        n = _count(ranked.values, rows, order, keeps_ties, logits_error, sign)
        first = place < torch.where(rows.undefined, 0, n)[:, None]
        found.append(torch.zeros_like(first).scatter(1, ranked.indices, first))
    return Truncation(*found)


def filtered_probabilities(
    logits: Tensor, truncation: Truncation, temperature: float | Tensor = 1.0
) -> Tensor:
    """softmax(logits / T) over the kept tokens, 0 elsewhere: float64 [B, V]; T above 0."""
    T = as_column(temperature, logits.device)
    return torch.softmax((logits.double() / T).masked_fill(~truncation.kept, -torch.inf), 1)


def token_counts(histories: Sequence[Sequence[int]], V: int) -> Tensor:
    """How often each token occurs in each history: int64 [B, V]."""
    return torch.stack(
        [torch.bincount(torch.as_tensor(h, dtype=torch.int64), minlength=V) for h in histories]
    )


def penalized(
    logits: Tensor,
    prompt_counts: Tensor,
    output_counts: Tensor,
    *,
    repetition: float | Tensor = 1.0,
    presence: float | Tensor = 0.0,
    frequency: float | Tensor = 0.0,
) -> Tensor:
    """Penalties as engines apply them, in the type of logits [B, V].

    A token that occurs in the prompt or the output has its logit divided by `repetition` if that is
    positive, else multiplied by it. Then one that occurs n times in the output, n > 0, loses
    frequency n + presence.

    Args:
        prompt_counts, output_counts: [B, V], integers (`token_counts`).
        repetition: > 0, 1 is off. presence, frequency: 0 is off. Numbers, or [B]; a row with one
            that is not finite, or with a repetition of 0 or below, becomes NaN: it has no draw.
    """
    repeat, present, often = (
        as_column(value, logits.device).to(logits.dtype)
        for value in (repetition, presence, frequency)
    )
    seen = (prompt_counts > 0) | (output_counts > 0)
    repeated = torch.where(logits > 0, logits / repeat, logits * repeat)
    less = often * output_counts + present * (output_counts > 0)
    found = torch.where(seen, repeated, logits) - less.to(logits.dtype)
    defined = (repeat > 0) & repeat.isfinite() & present.isfinite() & often.isfinite()
    return found.where(defined, torch.nan)


class _Rows:
    """The arguments of truncate: float64 [B, 1]; undefined, greedy: bool [B]."""

    def __init__(
        self,
        z: Tensor,
        T: float | Tensor,
        k: int | Tensor,
        p: float | Tensor,
        min_p: float | Tensor,
    ):
        V = z.shape[1]  # a k beyond it, which may be too large for a double, keeps as much
        k = k.clamp_max(V) if isinstance(k, Tensor) else min(k, V)
        fp32, fp64 = torch.float32, torch.float64
        T, self.k, self.p, self.min_p = (
            as_column(value, z.device, dtype).expand(len(z), 1)
            for value, dtype in ((T, fp32), (k, fp64), (p, fp64), (min_p, fp32))
        )
        undefined = (torch.isnan(z) | (z == torch.inf)).any(1) | ~torch.isfinite(z).any(1)
        undefined |= ~((T >= 0) & (torch.inf > T))[:, 0]
        self.undefined = undefined | (self.p.isnan() | self.min_p.isnan())[:, 0]
        self.greedy = (T < SMALLEST_TEMPERATURE)[:, 0]
        self.T = torch.where((self.greedy | undefined)[:, None], 1.0, T)
        self.logits = torch.where(self.undefined[:, None], 0.0, z)


def _count(
    y: Tensor, rows: _Rows, order: Sequence[str], keeps_ties: bool, error: float, sign: int
) -> Tensor:
    """How many of the ranked logits y [B, V] are kept: int64 [B].

    sign: 0 in exact arithmetic; 1 the most, -1 the fewest that rounding may make of it.
    """
    place = torch.arange(y.shape[1], device=y.device)
    first = y[:, :1]
    n = torch.isfinite(y).sum(1)
    T = torch.ones_like(first)
    # The first token always stays, if it is known which one is the first.
    least = 1 if sign >= 0 or error == 0 else 0
    for stage in order:
        if stage == "temperature":
            T = rows.T
            continue
        if stage == "top_k":
            on = rows.k > 0
            count = _swapped(y, rows.k[:, 0].long(), keeps_ties, error, sign)
        elif stage == "min_p":
            on = rows.min_p > 0
            limit = rows.min_p.clamp(1e-300, 1.0).log()
            slack = _RATIO_ERROR + (2 * error + first.abs() * _LOGIT_ULP) / T
            count = ((y - first) / T >= limit - sign * slack).sum(1)
        else:
            on = rows.p < 1
            p = torch.where(place < n[:, None], ((y - first) / T).exp(), 0.0)
            total = p.sum(1, keepdim=True)
            slack = MASS_ERROR + torch.expm1((4 * error / T).clamp_max(50.0))
            before = (p.cumsum(1) - p) / total
            count = (before < rows.p * REACHED + sign * slack).sum(1)
            count = _swapped(y, count.clamp_min(least), keeps_ties, error, sign)
        n = torch.where(on[:, 0], torch.minimum(n, count), n).clamp_min(least)
    one = _swapped(y, torch.ones_like(n), False, error, sign)
    return torch.where(rows.greedy, torch.minimum(n, one), n)


def _swapped(y: Tensor, n: Tensor, keeps_ties: bool, error: float, sign: int) -> Tensor:
    """How many of the first n may be kept, if logits closer than 2 error may change places.

    sign 1: with those that may come in; -1: without those that may go out.
    """
    V = y.shape[1]
    n = n.clamp(0, V)
    if keeps_ties or (sign > 0 and error > 0):
        last = y.gather(1, (n - 1).clamp_min(0)[:, None])
        reach = 2 * error if sign > 0 else 0.0
        n = torch.where(n > 0, (y >= last - reach).sum(1), 0)
    if sign < 0 and error > 0:
        behind = y.gather(1, n.clamp_max(V - 1)[:, None])
        n = torch.where(n < V, torch.minimum(n, (y > behind + 2 * error).sum(1)), n)
    return n
