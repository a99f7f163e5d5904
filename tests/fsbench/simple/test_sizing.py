"""The sizing model: the fit, the expected cost, and the best number of hot tokens."""

from __future__ import annotations

import numpy as np
import pytest

from fsbench.simple.hot import Coverage
from fsbench.simple.sizing import Cost, best, expected_us, fit

V = 20_000
SIZES = np.unique(np.geomspace(16, V, 24).round())
# a(H) = log(1 + H) / log(1 + V): concave, 1 at V.
COVER = Coverage(V, SIZES, np.log1p(SIZES) / np.log1p(V), np.log1p(SIZES) / np.log1p(V))
COST = Cost(0.001, 2.0, (0.001, 0.001), (2.0, 2.0))


def test_the_fit_recovers_the_line_and_its_interval_holds_it():
    generator = np.random.default_rng(0)
    H = np.geomspace(256, 100_000, 12)
    times = (1.5 + 3e-4 * H)[:, None] * (1 + 0.02 * generator.standard_normal((12, 200)))
    found = fit(H, times, resamples=300)
    assert found.c_us == pytest.approx(3e-4, rel=0.01)
    assert found.c0_us == pytest.approx(1.5, rel=0.02)
    assert found.c_interval_us[0] < 3e-4 < found.c_interval_us[1]
    assert found.c0_interval_us[0] < 1.5 < found.c0_interval_us[1]


def test_small_scans_count_as_much_as_large_ones():
    """A largest H that is off by 20 % (another cache) moves c0 by little."""
    H = np.geomspace(256, 100_000, 12)
    times = np.repeat((1.5 + 3e-4 * H)[:, None], 5, 1)
    times[-1] *= 1.2
    assert fit(H, times, 10).c0_us == pytest.approx(1.5, rel=0.1)


def test_expected_cost_by_hand():
    cover = Coverage(100, np.array([50.0, 100.0]), np.array([0.8, 1.0]), np.array([0.8, 1.0]))
    cost = Cost(2.0, 1.0, (2.0, 2.0), (1.0, 1.0))
    # 1 + 2 (0.8 50 + 0.2 50), and 1 + 2 (50 + 0.2 50)
    assert expected_us(50.0, cover, cost, both=False) == pytest.approx(101)
    assert expected_us(50.0, cover, cost, both=True) == pytest.approx(121)


@pytest.mark.parametrize("both", [False, True])
def test_the_root_of_the_condition_is_the_least_cost(both):
    found = best(COVER, COST, both)
    every = np.arange(1, V + 1)
    F = expected_us(every, COVER, COST, both)
    assert F[found.H - 1] == F.min() == found.cost_us
    assert found.root == pytest.approx(found.H, abs=1)


def test_nothing_covered_early_leaves_no_hot_set():
    """Flat text: the share is H / V, the least F2 is at the end, and no root is made up."""
    flat = Coverage(V, SIZES, SIZES / V, SIZES / V)
    found = best(flat, COST, both=True)
    assert found.cost_us == pytest.approx(2 + 0.001 * V, rel=0.35)
