"""Sampling controls of a step, one value for all of its rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fsbench.errors import InvalidArgument


@dataclass(frozen=True)
class Controls:
    """temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off.

    repetition (1 is off), presence and frequency (0 is off): see Plane.begin.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        fine = {
            "temperature": 0 <= self.temperature < math.inf,
            "top_k": self.top_k >= 0,
            "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1,
            "repetition": 0 < self.repetition < math.inf,
            "presence": math.isfinite(self.presence),
            "frequency": math.isfinite(self.frequency),
        }
        for name in (name for name, within in fine.items() if not within):
            raise InvalidArgument(f"{name}: expected a value in range; got {getattr(self, name)}")

    @property
    def penalises(self) -> bool:
        """Whether tokens that were seen are treated in another way than others."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def law(self) -> dict[str, Any]:
        """Temperature and filters, by name."""
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}

    @property
    def penalties(self) -> dict[str, Any]:
        """Penalties, by name."""
        return {name: getattr(self, name) for name in ("repetition", "presence", "frequency")}


PLAIN = Controls()
PRODUCTION = Controls(0.8, 50, 0.9, 0.02, repetition=1.1, presence=0.1, frequency=0.1)
"""All controls on, as in SIMPLE's evaluation (section 7.1, which gives no values)."""
