"""Statistics of timing samples: distribution-free, so nothing is assumed about their tails."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import binom

LEVEL = 0.95
"""Confidence level of every interval in results and figures."""


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Confidence interval of the median from order statistics.

    [x_(k), x_(n+1-k)] with the largest k for which P(Bin(n, 1/2) < k) <= (1 - LEVEL) / 2
    (the sign test inverted). With fewer than six samples it is the whole range, which is then all
    that can be said at 95 %.
    """
    ordered = np.sort(np.asarray(samples, dtype=float))
    n = len(ordered)
    k = max(1, int(binom.ppf((1 - LEVEL) / 2, n, 0.5)))  # smallest k with CDF(k) >= tail, 1-based
    return float(ordered[k - 1]), float(ordered[n - k])


def ratio_interval(
    numerator: tuple[float, float], denominator: tuple[float, float]
) -> tuple[float, float]:
    """Interval of a ratio of medians from the intervals of both (conservative)."""
    return numerator[0] / denominator[1], numerator[1] / denominator[0]
