"""Parts of every check: its verdict, where it runs, and how often chance may mislead it."""

from __future__ import annotations

from collections.abc import Sequence
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


WRONG = {
    "score": "its log-probabilities, entropies, ranks or largest tokens are wrong",
    "philox": "its random numbers are not those of the noise contract",
    "noise map": "its map from random bits to noise is wrong",
    "maximum": "its largest noise does not follow Gumbel's law",
    "oracle": "its tokens are not the oracle's",
    "undefined rows": "rows without a draw do not give -1, or disturb others",
    "greedy": "it is not greedy at T = 0",
    "edges": "it draws tokens that have no probability",
    "masks": "masks, biases or greedy rows are not kept to",
    "call": "rows with a temperature or seed of their own, or log-probabilities, are wrong",
    "invariance": "a token depends on what it must not depend on",
    "fit": "its tokens do not follow softmax(logits / T)",
    "fit of seeds": "its tokens do not follow softmax(logits / T) for every seed",
    "blocks": "the ends of blocks or of the vocabulary are drawn too often or too rarely",
    "tiles": "parts of the vocabulary are drawn too often or too rarely",
    "collisions": "equal tokens come too often or too rarely",
    "rows": "rows share noise",
    "steps": "steps share noise",
    "seeds": "seeds share noise",
    "samples": "samples of a row share noise",
    "tail": "unlikely tokens are drawn too often or too rarely",
    "variation": "a large vocabulary is not drawn from its law",
    "truncated oracle": "its tokens under filters are not the oracle's",
    "truncation": "filters do not keep what they should, or its law is wrong",
    "truncated draws": "draws under filters share noise",
    "requests": "the requests of engines are not drawn from their law",
    "quantized": "a quantized head's tokens are not those of its numbers",
    "speculation": "drafts change its tokens, or are accepted too often or too rarely",
}
"""Error that a failed check shows, in words; the name of a `tail` ends with its gap."""


def conclusion(checks: Sequence[Check]) -> str:
    """One plain sentence about a sampler: `passed: ..` or `rejected: ..`."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        draws = sum(check.draws for check in checks)
        deviating = [check.name for check in checks if check.deviates]
        but = f", but for what it declares ({', '.join(deviating)})" if deviating else ""
        count = f"{len(checks)} checks" if len(checks) > 1 else "1 check"
        return f"passed: {count} of {draws:.2g} draws found nothing wrong{but}"
    few = [check for check in failed if check.detail.startswith("draws ")]
    first = (few or failed)[0]
    wrong = WRONG[first.name.split(" ")[0] if first.name.startswith("tail") else first.name]
    said = first.detail.split(": ")[0] if few else f"{wrong} ({first.name}: {first.detail})"
    also = [check.name for check in failed if check is not first]
    return f"rejected: {said}" + (f"; also fails {', '.join(also)}" if also else "")


TEMPERATURES = (1.3, 0.7)
"""What `fsbench verify` asks for, unless told otherwise: no powers of two, so that logits / T are
rounded once more by a sampler that does so, and one on either side of 1."""


@dataclass(frozen=True)
class Setting:
    """Device, dtype and temperatures at which a provider is checked.

    second: another temperature, of about half of the checks; None for the same.
    truncated: the gate looks at what it does with filters; the other tiers always do.
    weights: of the problems, see Problem; a quantized head is not looked at with filters.
    """

    device: str
    dtype: str
    temperature: float = 1.0
    truncated: bool = False
    second: float | None = None
    weights: str = ""

    @property
    def sampled_temperature(self) -> float:
        """The temperature of checks that need draws: at T = 0 there are none, so 1."""
        return self.temperature or 1.0

    @property
    def second_temperature(self) -> float:
        """The temperature of the other checks that need draws."""
        return self.second or self.sampled_temperature

    def problem(self, B: int, V: int, temperature: float | None = None) -> Problem:
        """The Problem of a check; D = 64 leaves room for 64 different rows of logits."""
        T = self.temperature if temperature is None else temperature
        return Problem(B, 64, V, self.dtype, T, self.device, weights=self.weights)
