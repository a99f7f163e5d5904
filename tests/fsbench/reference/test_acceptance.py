"""coupled_acceptance against its definition, bounds, and counted draws of the reference."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import binomtest

from fsbench import reference

pytestmark = pytest.mark.usefixtures("one_thread")

V = 300


def logits_pair(seed: int, noise: float, sigma: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [1, V] of a target and of a drafter near it."""
    generator = torch.Generator().manual_seed(seed)
    y = sigma * torch.randn(1, V, generator=generator, dtype=torch.float64)
    return y, y + noise * torch.randn(1, V, generator=generator, dtype=torch.float64)


GROUPS = reference.group_and_member(torch.arange(V))[0]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.5, 2.0])
def test_token_noise_is_the_sum_over_pairs_and_within_its_bounds(noise):
    p, q = (y.softmax(1) for y in logits_pair(1, noise))
    q[0, :50] = 0  # of a reduced vocabulary
    q /= q.sum()
    p[0, 290:] = 0
    pairs = [torch.maximum(p / p[0, i], q / q[0, i]).nan_to_num(0).sum() for i in range(50, 290)]
    exact = sum(1 / each for each in pairs)
    rate = reference.coupled_acceptance(p, q)
    assert rate.shape == (1,) and torch.allclose(rate, exact, rtol=1e-12)
    distance = (p - q).abs().sum() / 2
    assert (1 - distance) / (1 + distance) <= rate <= 1 - distance


def test_group_noise_may_stay_below_the_bound_of_token_noise():
    # Mass that moves from the first member of a group to its last shifts all between.
    members = (GROUPS == 0).nonzero()[:, 0]
    p, q = torch.zeros(2, 1, V, dtype=torch.float64)
    p[0, members[:-1]] = 1 / (len(members) - 1)
    q[0, members[1:]] = 1 / (len(members) - 1)
    assert reference.coupled_acceptance(p, q, GROUPS) < 1e-12
    assert reference.coupled_acceptance(p, q) > 0.93
    assert torch.allclose(reference.coupled_acceptance(p, p, GROUPS), torch.ones(1).double())


@pytest.mark.parametrize("form", ["token", "group"])
@pytest.mark.parametrize("noise", [0.2, 1.0])
def test_draws_agree_as_often_as_expected(form, noise):
    draws, T = 4000, 0.8
    y, z = logits_pair(2, noise)
    seed, step = torch.arange(draws) * 977 + 5, torch.zeros(1, dtype=torch.int64)
    tokens = [reference.expect(x.expand(draws, -1), seed, step, T, form).tokens for x in (y, z)]
    hits = int((tokens[0] == tokens[1]).sum())
    p, q = (x.div(T).softmax(1) for x in (y, z))
    expected_rate = float(reference.coupled_acceptance(p, q, None if form == "token" else GROUPS))
    assert binomtest(hits, draws, expected_rate).pvalue > 1e-4  # the seeds are fixed
    other = float(reference.coupled_acceptance(p, q, GROUPS if form == "token" else None))
    assert binomtest(hits, draws, other).pvalue < 1e-4
