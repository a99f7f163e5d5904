"""Doubles for tests of the measuring loop: a small problem, and a log of events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsbench.problem import Problem

SMALL = Problem(2, 16, 40, "fp32", device="cpu")


class Log(list[tuple[Any, ...]]):
    """Events in order, (sampler, "build" or "step", B), and offsets by sampler."""

    def __init__(self) -> None:
        self.offsets: dict[str, list[int]] = {}
        self.weights: dict[str, list[int]] = {}

    def steps(self) -> str:
        """The samplers stepped, one letter each."""
        return "".join(name for name, event, _ in self if event == "step")


def lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "points.jsonl").open()]
