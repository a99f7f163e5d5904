"""Acceptance rate of drafts: the probability that draws from p and q with the same noise agree.

With token noise, token i wins the race E_j / p_j under both p and q if E_j >= E_i max(p_j / p_i,
q_j / q_i) for every j, which has the probability 1 / sum_j max(p_j / p_i, q_j / q_i). With group
noise this is true of groups; within a group, one uniform number selects the same member if it lies
in both members' intervals. See docs/guide/speculation.md.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coupled_acceptance(p: Tensor, q: Tensor, groups: Tensor | None = None) -> Tensor:
    """Return the probability that draws from p and q with the same noise agree: float64 [B].

    Args:
        p, q: [B, V], probabilities.
        groups: int64 [V], the group of each token, for group noise; members are in the order of
            their ids. None for token noise.
    """
    p, q = p.double(), q.double()
    if groups is None:
        return _both_win(p, q).sum(1)
    masses = [p.new_zeros(len(p), int(groups.max()) + 1).index_add_(1, groups, x) for x in (p, q)]
    order = groups.argsort(stable=True)
    group_of = groups[order]
    intervals = []
    for x, mass in zip((p, q), masses, strict=True):
        # The sum within a group is the sum over all tokens minus that of earlier groups.
        before = mass.cumsum(1) - mass
        sums, x = x[:, order].cumsum(1) - before[:, group_of], x[:, order]
        scale = mass[:, group_of].clamp_min(torch.finfo(torch.float64).tiny)
        intervals.append(((sums - x) / scale, sums / scale))
    (low_p, high_p), (low_q, high_q) = intervals
    shared = torch.minimum(high_p, high_q) - torch.maximum(low_p, low_q)
    agree = torch.zeros_like(masses[0]).index_add_(1, group_of, shared.clamp_min(0))
    return (_both_win(*masses) * agree.clamp_max(1)).sum(1)


def _both_win(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that each index wins the race under both p and q: [B, n]."""
    order = (q / p).nan_to_num(0.0, torch.inf).argsort(1)
    p, q = p.gather(1, order), q.gather(1, order)
    # In the order of q / p, max(p_j / p_i, q_j / q_i) is the first up to i, the second after i.
    up_to = p.cumsum(1)
    after = q.flip(1).cumsum(1).flip(1) - q
    p_win = 1 / (up_to / p + after / q)
    p_win = torch.where((p > 0) & (q > 0), p_win, 0.0)
    return torch.zeros_like(p_win).scatter_(1, order, p_win)
