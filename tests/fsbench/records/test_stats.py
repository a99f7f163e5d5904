"""Intervals of medians and ratios against known ranks and exact coverage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fsbench.records.stats import LEVEL, median_interval, ratio_interval


@pytest.mark.parametrize(
    ("n", "low", "high"),
    [(1, 1, 1), (5, 1, 5), (6, 1, 6), (9, 2, 8), (20, 6, 15), (25, 8, 18), (100, 40, 61)],
)
def test_ranks_are_those_of_the_sign_test(n, low, high):
    """Ranks from printed tables of the sign test at 95 %."""
    assert median_interval(range(1, n + 1)) == (low, high)


def test_the_interval_is_the_narrowest_that_covers():
    for n in range(6, 300):
        low, high = (int(rank) for rank in median_interval(range(1, n + 1)))
        assert low + high == n + 1
        assert 1 - 2 * binom.cdf(low - 1, n, 0.5) >= LEVEL
        assert 1 - 2 * binom.cdf(low, n, 0.5) < LEVEL


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=60), st.randoms())
@settings(max_examples=20)
def test_the_interval_holds_the_median_in_any_order(samples, random):
    low, high = median_interval(samples)
    assert min(samples) <= low <= np.median(samples) <= high <= max(samples)
    random.shuffle(samples)
    assert median_interval(samples) == (low, high)


def test_ratio_interval_is_the_widest_that_both_allow():
    assert ratio_interval((8.0, 12.0), (2.0, 4.0)) == (2.0, 6.0)
