"""The verdict of a check, the setting that it runs in, and the significance levels of tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsbench.problem import Problem

FAMILY = 1e-6
"""Probability that a correct sampler fails any statistical check of a battery. Seeds are fixed, so
a verdict is reproducible: a correct sampler either always passes or always fails."""

MOST_CHECKS = 20
"""Largest number of statistical checks in a battery; each is run at an equal part of FAMILY
(Bonferroni)."""

ALPHA = FAMILY / MOST_CHECKS
"""Level of a check: it fails if its p-value, corrected for the tests in the check, is not above."""

POWER = 0.9
"""Probability with which a check detects an error of the size that it reports in `detects`."""


@dataclass(frozen=True)
class Check:
    """The verdict of a check.

    detail: the observation, in words.
    draws: number of tokens drawn, rows compared or codes tried.
    statistic: the number behind the verdict: G, a Kolmogorov-Smirnov distance, drawn / expected,
        the smallest of many p-values, or the largest count of one difference.
    p_value: of a statistical check, corrected for the tests in it.
    bound: upper bound on a distance, if the check has one; `detail` names the distance.
    detects: the error that the check finds with probability POWER, in words; None if it is not
        statistical.
    deviates: the check passed only because the sampler declares a deviation (Capabilities).
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
        """Return ok, not exact (a declared deviation) or FAILED."""
        if not self.passed:
            return "FAILED"
        return "not exact" if self.deviates else "ok"


FAULTS = {
    "score": "its log-probabilities, entropies, ranks or largest tokens are wrong",
    "philox": "its random numbers are not those of the noise contract",
    "noise map": "its map from random bits to noise is wrong",
    "maximum": "its largest noise does not follow the Gumbel distribution",
    "oracle": "its tokens are not the oracle's",
    "undefined rows": "rows without a draw do not give -1, or disturb others",
    "greedy": "it is not greedy at T = 0",
    "edges": "it draws tokens that have no probability",
    "masks": "masks, biases or T = 0 of a row are not respected",
    "call": "temperatures or seeds by row, or log-probabilities, are wrong",
    "invariance": "a token depends on what it must not depend on",
    "fit": "its tokens do not follow softmax(logits / T)",
    "fit of seeds": "its tokens do not follow softmax(logits / T) for every seed",
    "blocks": "the ends of blocks or of the vocabulary are drawn too often or too rarely",
    "tiles": "parts of the vocabulary are drawn too often or too rarely",
    "collisions": "equal tokens are drawn too often or too rarely",
    "rows": "rows share noise",
    "steps": "steps share noise",
    "seeds": "seeds share noise",
    "samples": "samples of a row share noise",
    "tail": "unlikely tokens are drawn too often or too rarely",
    "variation": "its tokens of a large vocabulary do not follow softmax(logits / T)",
    "truncated oracle": "its tokens under filters are not the oracle's",
    "truncation": "filters keep the wrong tokens, or in the wrong proportions",
    "truncated draws": "draws under filters share noise",
    "requests": "its tokens for engine requests have the wrong distribution",
    "quantized": "its tokens for a quantized head are not the oracle's",
    "speculation": "drafts change its tokens, or are accepted too often or too rarely",
}
"""Fault that each failed check indicates, by check; the name of a `tail` ends with its gap."""


def conclusion(checks: Sequence[Check]) -> str:
    """Return one sentence about a sampler: `passed: ..` or `rejected: ..`."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        draws = sum(check.draws for check in checks)
        deviating = [check.name for check in checks if check.deviates]
        but = f", except for declared deviations ({', '.join(deviating)})" if deviating else ""
        count = f"{len(checks)} checks" if len(checks) > 1 else "1 check"
        return f"passed: {count} of {draws:.2g} draws found nothing wrong{but}"
    lacking_tokens = [check for check in failed if check.detail.startswith("draws ")]
    first = (lacking_tokens or failed)[0]
    fault = FAULTS["tail" if first.name.startswith("tail") else first.name]
    reason = f"{fault} ({first.name}: {first.detail})"
    if lacking_tokens:
        reason = first.detail.split(": ")[0]
    others = [check.name for check in failed if check is not first]
    return f"rejected: {reason}" + (f"; also fails {', '.join(others)}" if others else "")


TEMPERATURES = (1.3, 0.7)
"""Default temperatures of `fsbench verify`, one on either side of 1. They are no powers of two, so
that a sampler that rounds logits / T changes them."""


@dataclass(frozen=True)
class Setting:
    """Device, dtype and temperatures at which a provider is checked.

    truncated: the gate checks filters; the other tiers always do.
    second: temperature of about half of the checks; None for the same temperature.
    weights: see Problem; filters are not checked on a quantized head.
    """

    device: str
    dtype: str
    temperature: float = 1.0
    truncated: bool = False
    second: float | None = None
    weights: str = ""

    @property
    def sampled_temperature(self) -> float:
        """Return the temperature of checks that need draws: 1 in place of 0."""
        return self.temperature or 1.0

    @property
    def second_temperature(self) -> float:
        """Return the temperature of the other checks that need draws."""
        return self.second or self.sampled_temperature

    def problem(self, B: int, V: int, temperature: float | None = None) -> Problem:
        """Return the Problem of a check; D = 64 allows 64 different rows of logits."""
        T = self.temperature if temperature is None else temperature
        return Problem(B, 64, V, self.dtype, T, self.device, weights=self.weights)
