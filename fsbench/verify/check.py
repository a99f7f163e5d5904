"""What every check shares: its verdict, where it runs, and how often chance may mislead it."""

from __future__ import annotations

from dataclasses import dataclass

from fsbench.problem import Problem

FAMILY = 1e-6
"""Chance that an honest sampler fails any statistical check of a battery. Seeds are fixed, so a
verdict never flickers: an unlucky honest sampler would fail every time, a lucky one never."""

MOST_CHECKS = 20
"""Statistical checks that a battery has at most; each gets an equal part of FAMILY (Bonferroni)."""

ALPHA = FAMILY / MOST_CHECKS
"""A check fails if its p-value, corrected for the tests within the check, is not above this."""

POWER = 0.9
"""Probability with which a check finds what it says it detects."""


@dataclass(frozen=True)
class Check:
    """One verdict. `detail` says in words what was seen.

    statistic: the number that the verdict rests on: G, a Kolmogorov-Smirnov distance, drawn over
        expected, the smallest of many p-values, the largest count of one difference.
    draws: tokens drawn, rows compared or numbers tried.
    p_value: of a statistical check, corrected for the tests within it.
    bound: upper bound on a distance, where the check gives one; `detail` names the distance.
    detects: what the check finds with probability POWER, in words; None if it is not statistical.
    deviates: it passed only because the sampler declares that it deviates (Capabilities).
    """

    name: str
    passed: bool
    detail: str
    draws: int = 0
    statistic: float | None = None
    p_value: float | None = None
    bound: float | None = None
    detects: str | None = None
    deviates: bool = False

    @property
    def verdict(self) -> str:
        """ok, not exact (a declared deviation) or FAILED."""
        if not self.passed:
            return "FAILED"
        return "not exact" if self.deviates else "ok"


@dataclass(frozen=True)
class Setting:
    """Where and at what temperature a provider is checked.

    truncated: the gate looks at what it does with filters; the other tiers always do.
    """

    device: str
    dtype: str
    temperature: float = 1.0
    truncated: bool = False

    @property
    def sampled_temperature(self) -> float:
        """The temperature of checks that need draws: at T = 0 there are none, so 1."""
        return self.temperature or 1.0

    def problem(self, B: int, V: int, temperature: float | None = None) -> Problem:
        """The Problem of a check; D = 64 leaves room for 64 different rows of logits."""
        T = self.temperature if temperature is None else temperature
        return Problem(B, 64, V, self.dtype, T, self.device)
