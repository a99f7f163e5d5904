"""SIMPLE's model of the best number of hot tokens (section 5.4, equations 10 to 12).

    T(H) = c H + c0                                     a scan of H logits
    F(H) = c0 + c (a(H) H + (1 - a(H)) (V - H))          equation 10: hot set, or tail
    F2(H) = c0 + c (H + (1 - a(H)) (V - H))              the hot set always, then perhaps the tail

F charges a row that falls on the tail for the tail only. To decide that, the mass of the hot set
must be known. If the sampler scans the hot set for it, F2 is the cost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor

from fsbench.records.stats import median_interval
from fsbench.simple.hot import Coverage
from fsbench.simple.native import core
from fsbench.simple.reference import tail
from fsbench.simple.steps import Offload


@dataclass(frozen=True)
class Cost:
    """T(H) = c_us H + c0_us, with 95 % bootstrap intervals [low, high]."""

    c_us: float
    c0_us: float
    c_interval_us: tuple[float, float]
    c0_interval_us: tuple[float, float]


def fit(H: np.ndarray, times_us: np.ndarray, resamples: int = 1000) -> Cost:
    """Weighted least squares of the medians of times_us [len(H), repeats], weights 1 / T.

    Unweighted, the largest H alone would fix c0. The bootstrap draws repeats for each H.
    """
    best = _weighted(H, np.median(times_us, axis=1))
    generator = np.random.default_rng(0)
    repeats = times_us.shape[1]
    drawn = np.empty((resamples, 2))
    for number in range(resamples):
        chosen = generator.integers(0, repeats, times_us.shape)
        drawn[number] = _weighted(H, np.median(np.take_along_axis(times_us, chosen, 1), axis=1))
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    return Cost(*best, *((float(low[i]), float(high[i])) for i in range(2)))


def _weighted(H: np.ndarray, T: np.ndarray) -> tuple[float, float]:
    c0, c = np.polynomial.polynomial.polyfit(H, T, 1, w=1 / T)
    return float(c), float(c0)


def expected_us(H: np.ndarray | float, cover: Coverage, cost: Cost, both: bool) -> np.ndarray:
    """Return F2 if `both` (the hot set is always scanned), else F of equation 10."""
    a, tail = cover.share(H), cover.V - np.asarray(H)
    hot = np.asarray(H) if both else a * H
    return cost.c0_us + cost.c_us * (hot + (1 - a) * tail)


@dataclass(frozen=True)
class Best:
    """The best H by equation 12 (None without a root), and by enumeration with its cost."""

    root: float | None
    H: int
    cost_us: float


def best(cover: Coverage, cost: Cost, both: bool) -> Best:
    """Return H* where dF/dH = 0, and the integer H of the least F.

    F: 2 a + (2 H - V) a' = 1. F2: a + (H - V) a' = 0 (its derivative is c (a - (V - H) a')).
    """
    every = np.arange(1, cover.V + 1)
    F = expected_us(every, cover, cost, both)
    H_best = int(F.argmin()) + 1

    def condition(H: float) -> float:
        a, slope = float(cover.share(H)), float(cover.slope(H))
        return a + (H - cover.V) * slope if both else 2 * a + (2 * H - cover.V) * slope - 1

    # The condition is F' / c: look for its sign change nearest to the least F.
    lower, upper = max(1.0, H_best / 2), min(float(cover.V), H_best * 2.0)
    root = None
    if condition(lower) < 0 < condition(upper):
        root = float(brentq(condition, lower, upper))
    return Best(root, H_best, float(F[H_best - 1]))


def scans(
    logits: Tensor, sizes: Sequence[int], repeats: int
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Measure the time of a row for several numbers of hot tokens, on the calling thread.

    Args:
        logits: fp32 [rows, V], hot tokens first; more rows than the caches hold.
        sizes: Numbers H of hot tokens; V scans a row whole.
        repeats: Passes over all rows; the sizes take turns.

    Returns:
        One row for each H: h; settled_us, microseconds of a row that the hot tokens settle; row_us
        with its 95 % interval, for random uniforms; hits, the share that the hot tokens settle.
        And times_us [sizes, repeats] of the rows that the hot tokens settle, for `fit`.
    """
    rows, V = logits.shape
    plane = Offload(rows, V, samplers=1).plane
    ring = plane.ring
    ring.logits[0].copy_(logits)
    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = torch.full((rows,), -torch.inf), torch.zeros(rows)
    tails = [whole if H == V else tail(logits, H, 1.0) for H in sizes]
    times = np.empty((2, len(sizes), repeats))
    for repeat in range(-1, repeats):  # round -1 warms up, and is overwritten
        for number, H in enumerate(sizes):
            ring.tail_max[0], ring.tail_sum[0] = tails[number]
            ring.parts["shape"][0] = torch.tensor(plane.shape.hot(H))
            for kind, numbers in enumerate((torch.tensor(1e-9), uniform)):
                ring.uniform[0] = numbers
                begin = time.perf_counter()
                core().fsb_rows(ring.pointer(), 0, 0, rows)
                times[kind, number, repeat] = (time.perf_counter() - begin) * 1e6 / rows
    mass = logits.double().softmax(1).cumsum(1)
    lines = []
    for number, H in enumerate(sizes):
        low, high = median_interval(times[1, number])
        lines.append(
            {
                "h": H,
                "settled_us": float(np.median(times[0, number])),
                "row_us": float(np.median(times[1, number])),
                "lo_us": low,
                "hi_us": high,
                "hits": float((mass[:, H - 1] > uniform).double().mean()),
            }
        )
    return lines, times[0]
