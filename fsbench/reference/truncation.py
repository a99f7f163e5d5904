"""Truncated sampling: penalties on earlier tokens, and the tokens that the filters keep.

Each filter keeps a prefix of the tokens ordered by descending logit, then by ascending id. All
filters together therefore keep a prefix, too.

    top_k   the first k tokens
    min_p   tokens with a probability of at least min_p times the largest
    top_p   the shortest prefix whose probabilities sum to p or more. p is not rounded: a number is
            float64, a tensor keeps its dtype. A sum within 2^-22 p of p counts as p (REACHED)

Probabilities are those of the tokens that earlier filters kept, normalized again, at the
temperature if it is applied earlier, else at T = 1. The order of filters is a property of a sampler
(ORDER is fsbench's). Top-p after top-k is a part of the mass of the k tokens, before top-k
("joint") a part of the whole mass. In any order, at least one token is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.reference.logits import SMALLEST_TEMPERATURE, as_column

ORDER = ("temperature", "min_p", "top_k", "top_p")
"""Order of fsbench's samplers (problem.FILTER_ORDER)."""
MASS_ERROR = 2.0**-16
"""Allowed error of a sum of exponentials in fp32, relative to the whole sum."""

REACHED = 1 - 2.0**-22
"""Fraction of p that counts as p, so that rounding of logits or of p adds no token if masses sum to
p exactly: 0.5 + 0.3 reaches 0.8, and three of five equal tokens reach 0.6."""

_RATIO_ERROR = 2.0**-19  # error of log(p / largest p), in addition to the rounding of logits
_LOGIT_ULP = 2.0**-22


class Truncation(NamedTuple):
    """Tokens that the filters keep: bool [B, V] each; none in a row without a draw.

    kept: in exact arithmetic.
    surely, possibly: tokens that every rounding keeps, and that some rounding keeps, of sums in
        fp32 and of logits within `logits_error`. Equal for top-k alone on exact logits.
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
    """Return the tokens of logits [B, V] (any float type, used exactly) that the filters keep.

    Args:
        temperature: a number, or [B]; a row at T = 0 keeps the first token only.
        top_k, top_p, min_p: numbers, or [B]. Off at <= 0, >= 1 and <= 0. A top_p <= 0 and a
            min_p > 1 keep one token (and its ties). A row with NaN has no draw.
        order: of "temperature" and the filters.
        keeps_ties: see Capabilities.
        logits_error: bound on the difference between a sampler's logits and these.
    """
    z = logits.double()
    V = z.shape[1]
    rows = _Rows(z, temperature, top_k, top_p, min_p)
    ranked = rows.logits.sort(dim=1, descending=True, stable=True)
    place = torch.arange(V, device=z.device)
    masks = []
    for sign in (0, -1, 1):
        n = _count(ranked.values, rows, order, keeps_ties, logits_error, sign)
        first = place < torch.where(rows.undefined, 0, n)[:, None]
        masks.append(torch.zeros_like(first).scatter(1, ranked.indices, first))
    return Truncation(*masks)


def filtered_probabilities(
    logits: Tensor, truncation: Truncation, temperature: float | Tensor = 1.0
) -> Tensor:
    """Return softmax(logits / T) over the kept tokens, 0 elsewhere: float64 [B, V]; T > 0."""
    T = as_column(temperature, logits.device)
    return torch.softmax((logits.double() / T).masked_fill(~truncation.kept, -torch.inf), 1)


def token_counts(histories: Sequence[Sequence[int]], V: int) -> Tensor:
    """Return the number of occurrences of each token in each history: int64 [B, V]."""
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
    """Apply penalties as engines do, in the type of logits [B, V].

    The logit of a token that occurs in the prompt or the output is divided by `repetition` if it is
    positive, else multiplied. Then the logit of a token that occurs n > 0 times in the output is
    reduced by n * frequency + presence.

    Args:
        prompt_counts, output_counts: [B, V], integers (`token_counts`).
        repetition: number or [B], > 0; 1 is off.
        presence, frequency: number or [B]; 0 is off.

    Rows with a penalty that is not finite, or with repetition <= 0, become NaN: they have no draw.
    """
    repeat, present, frequent = (
        as_column(value, logits.device).to(logits.dtype)
        for value in (repetition, presence, frequency)
    )
    occurs = (prompt_counts > 0) | (output_counts > 0)
    repeated = torch.where(logits > 0, logits / repeat, logits * repeat)
    reduction = frequent * output_counts + present * (output_counts > 0)
    changed = torch.where(occurs, repeated, logits) - reduction.to(logits.dtype)
    defined = (repeat > 0) & repeat.isfinite() & present.isfinite() & frequent.isfinite()
    return changed.where(defined, torch.nan)


class _Rows:
    """Arguments of `truncate` as float64 [B, 1]; undefined, greedy: bool [B]."""

    def __init__(
        self,
        z: Tensor,
        T: float | Tensor,
        k: int | Tensor,
        p: float | Tensor,
        min_p: float | Tensor,
    ):
        V = z.shape[1]  # a larger k keeps as many tokens, and may not fit a double
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
    """Return the number of ranked logits y [B, V] that are kept: int64 [B].

    sign: 0 in exact arithmetic; 1 the most, -1 the fewest under rounding.
    """
    place = torch.arange(y.shape[1], device=y.device)
    first = y[:, :1]
    n = torch.isfinite(y).sum(1)
    T = torch.ones_like(first)
    # The first token is always kept, unless rounding may change which one is first.
    least = 1 if sign >= 0 or error == 0 else 0
    for stage in order:
        if stage == "temperature":
            T = rows.T
            continue
        if stage == "top_k":
            on = rows.k > 0
            count = _reordered_count(y, rows.k[:, 0].long(), keeps_ties, error, sign)
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
            count = _reordered_count(y, count.clamp_min(least), keeps_ties, error, sign)
        n = torch.where(on[:, 0], torch.minimum(n, count), n).clamp_min(least)
    one = _reordered_count(y, torch.ones_like(n), False, error, sign)
    return torch.where(rows.greedy, torch.minimum(n, one), n)


def _reordered_count(y: Tensor, n: Tensor, keeps_ties: bool, error: float, sign: int) -> Tensor:
    """Return n with the tokens that a reordering of logits closer than 2 error changes.

    sign: 1 adds tokens that may enter the first n; -1 removes tokens that may leave them.
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
