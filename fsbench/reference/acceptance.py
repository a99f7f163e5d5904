"""How often a draft is accepted: the chance that two laws, drawn from with the same noise, agree.

With token noise token i wins the race E_j / p_j of both laws if E_j >= E_i max(p_j / p_i, q_j /
q_i) for every j, and that has the probability 1 / sum_j max(p_j / p_i, q_j / q_i). With group noise
the same holds of the groups, and inside of a group one uniform number falls on the same member of
both where the members' intervals overlap. docs/guide/speculation.md says what follows from it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coupled_acceptance(p: Tensor, q: Tensor, groups: Tensor | None = None) -> Tensor:
    """The chance that draws from p and q with the same noise are the same token: float64 [B].

    Args:
        p, q: [B, V], probabilities.
        groups: of group noise, int64 [V], the group of each token; its members are in the order of
            their ids. None is token noise.
    """
    p, q = p.double(), q.double()
    if groups is None:
        return _both_win(p, q).sum(1)
    whole = [p.new_zeros(len(p), int(groups.max()) + 1).index_add_(1, groups, x) for x in (p, q)]
    order = groups.argsort(stable=True)
    of = groups[order]
    ends = []
    for x, mass in zip((p, q), whole, strict=True):
        # cumsum over all groups, less what is before each one.
        before = mass.cumsum(1) - mass
        sums, x = x[:, order].cumsum(1) - before[:, of], x[:, order]
        scale = mass[:, of].clamp_min(torch.finfo(torch.float64).tiny)
        ends.append(((sums - x) / scale, sums / scale))
    (low_p, high_p), (low_q, high_q) = ends
    shared = torch.minimum(high_p, high_q) - torch.maximum(low_p, low_q)
    agree = torch.zeros_like(whole[0]).index_add_(1, of, shared.clamp_min(0))
    return (_both_win(*whole) * agree.clamp_max(1)).sum(1)


def _both_win(p: Tensor, q: Tensor) -> Tensor:
    """The chance that an index wins the race of both laws, [B, n]; in the order of q / p."""
    order = (q / p).nan_to_num(0.0, torch.inf).argsort(1)
    p, q = p.gather(1, order), q.gather(1, order)
    # max(p_j / p_i, q_j / q_i) is the first up to i, the second behind it.
    up_to = p.cumsum(1)
    behind = q.flip(1).cumsum(1).flip(1) - q
    chance = 1 / (up_to / p + behind / q)
    chance = torch.where((p > 0) & (q > 0), chance, 0.0)
    return torch.zeros_like(chance).scatter_(1, order, chance)
