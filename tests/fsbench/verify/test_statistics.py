"""Statistics compared with simulations: p-values are valid, and reported powers are reached."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsbench.errors import VerificationFailed
from fsbench.verify import distribution, joint
from fsbench.verify.check import ALPHA
from fsbench.verify.statistics import (
    binomial_p,
    detectable_bias,
    detectable_factor,
    detectable_share,
    detectable_spike,
    g_test,
    goodness_of_fit,
    independence_p,
    largest_count_p,
    poisson_p,
    pooled,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_pooled_bins_hold_enough_and_leave_nothing_out():
    expected = np.array([100.0, 3, 3, 30, 24, 0.5, 0.5, 26, 10])
    edges = pooled(expected)
    assert edges.tolist() == [0, 1, 4, 7]
    sums = np.add.reduceat(expected, edges)
    assert sums.min() >= 25 and sums.sum() == expected.sum()


def test_an_impossible_draw_rejects_and_is_no_bin():
    p = np.array([0.5, 0.5, 0.0, 0.0])
    assert g_test(np.array([500, 500, 0, 0]), p).bins == 2
    assert g_test(np.array([500, 499, 0, 1]), p).p_value == 0.0


def test_p_values_of_the_g_test_are_uniform():
    p = np.full(60, 1 / 60)
    rng = np.random.default_rng(0)
    p_values = np.array([g_test(rng.multinomial(2**13, p), p).p_value for _ in range(200)])
    assert distribution.uniform_p(p_values) > 1e-3


def test_the_variation_bound_holds_and_is_of_use():
    """The distribution is off by 0.002; the bound is above that and below 0.004."""
    p = np.full(1000, 1e-3)
    q = p * (1 + 0.004 * np.where(np.arange(1000) % 2, 1, -1))  # total variation 0.002
    rng = np.random.default_rng(0)
    bounds = [g_test(rng.multinomial(10**7, q), p).bound for _ in range(50)]
    assert min(bounds) > 0.002 and max(bounds) < 0.004
    assert g_test(rng.multinomial(10**8, p), p).bound < 0.001


def test_the_bound_does_not_reward_luck_and_is_none_if_the_test_rejects():
    p = np.full(100, 0.01)
    even = g_test(np.full(100, 1000), p)
    assert even.p_value == 1.0 and 0 < even.bound < 0.02
    assert even.bound == g_test(np.array([1010, 990] * 50), p).bound
    assert g_test(np.array([1100, 900] * 50), p).bound is None


@pytest.mark.parametrize("bins", [2, 3, 10, 10_000])
def test_there_is_a_bound_for_any_number_of_bins(bins):
    p, rng = np.full(bins, 1 / bins), np.random.default_rng(0)
    for _ in range(20):
        assert 0 < g_test(rng.multinomial(100 * bins, p), p).bound < 1


@pytest.mark.parametrize(("hits", "low", "high"), [(70, 0.1, 0.1), (130, 0.1, 0.1)])
def test_binomial_p_values_are_two_sided(hits, low, high):
    exact = binomial_p(hits, 1000, low, high)
    assert 1e-4 < exact < 1e-2
    assert binomial_p(hits, 1000, 0.06, 0.14) > 0.1
    assert binomial_p(100, 1000, 0.1) == 1.0


def test_the_detectable_share_is_that_of_a_simulation():
    draws, p = 10**5, 0.002
    loss = float(detectable_share(draws, p).split()[2])
    hits = np.random.default_rng(0).binomial(draws, p * (1 - loss), 4000)
    rejected = np.mean([binomial_p(int(h), draws, p) <= ALPHA for h in hits])
    assert rejected == pytest.approx(0.9, abs=0.05)
    assert detectable_share(100, 1e-3).endswith("times too many")


def test_the_detectable_factor_is_that_of_a_simulation():
    mean = 30_000.0
    pairs = np.random.default_rng(0).poisson(mean * (1 + detectable_factor(mean)), 1000)
    rejected = np.mean([poisson_p(int(n), mean) <= ALPHA for n in pairs])
    assert rejected == pytest.approx(0.9, abs=0.05)


def test_the_detectable_spike_is_that_of_a_simulation():
    cells, draws = 1000, 10_000
    share = detectable_spike(cells, draws, 1)
    rng = np.random.default_rng(0)
    shared = rng.binomial(draws, share, 500)
    rejected = []
    for n in shared:
        counts = np.bincount(rng.integers(0, cells, draws - n), minlength=cells)
        counts[17] += n
        rejected.append(largest_count_p(int(counts.max()), cells, draws) <= ALPHA)
    assert np.mean(rejected) == pytest.approx(0.9, abs=0.06)


def test_overlapping_pairs_of_a_chain_have_honest_p_values():
    generator = torch.Generator().manual_seed(0)
    p_values = []
    for _ in range(300):
        x = torch.randint(4000, (3000,), generator=generator)
        p_values.append(joint.independence(x[:-1], x[1:], 4000))
    assert distribution.uniform_p(np.array(p_values)) > 1e-3


def test_dependent_places_are_found():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(4000, (2, 20_000), generator=generator)
    assert joint.independence(x, y, 4000) > 1e-3
    near = (x + torch.randint(200, (20_000,), generator=generator)) % 4000
    mixed = torch.where(torch.rand(20_000, generator=generator) < 0.1, near, y)
    assert joint.independence(x, mixed, 4000) < ALPHA
    assert independence_p(np.array([[50, 0], [50, 0]])) == 0.0


def test_bins_of_the_large_problem_are_about_a_thousand_and_leave_no_token_out():
    V = 151_936
    p = 1 / torch.arange(1, V + 1, dtype=torch.float64)
    p = (p / p.sum())[torch.randperm(V, generator=torch.Generator().manual_seed(0))]
    bins = distribution.position_bins(p)
    assert len(bins) == V and 900 < bins.max() + 1 < 1300
    head = p.argsort(descending=True)[:128]
    assert (torch.bincount(bins)[bins[head]] == 1).all()
    # At 10^8 draws hardly any bin is so rare that it is pooled.
    expected = np.bincount(bins.numpy(), weights=1e8 * p.numpy())
    assert (expected >= 25).mean() > 0.99


# Goodness of fit


def test_rare_tokens_are_pooled_not_dropped():
    """A tenth of the draws are tokens that are too rare for single bins."""
    p = np.concatenate([np.full(10, 0.09999), np.full(1000, 0.0001 / 1000)])
    q = np.concatenate([np.full(10, 0.09), np.full(1000, 0.1 / 1000)])
    counts = np.random.default_rng(0).multinomial(10_000, q)
    assert not goodness_of_fit(counts, p / p.sum()).passed


def test_too_few_draws_to_test_anything_do_not_pass():
    with pytest.raises(VerificationFailed, match="expected two bins"):
        goodness_of_fit(np.array([30, 0]), np.array([0.9, 0.1]))


def test_the_detectable_bias_is_that_of_a_simulation():
    bins, draws = 40, 2**14
    bias = detectable_bias(bins - 1, draws)
    p = np.full(bins, 1 / bins)
    q = p * (1 + bias * np.where(np.arange(bins) % 2, 1, -1))  # rms relative error: bias
    generator = np.random.default_rng(0)
    rejected = [not goodness_of_fit(generator.multinomial(draws, q), p).passed for _ in range(400)]
    assert np.mean(rejected) == pytest.approx(0.9, abs=0.05)
