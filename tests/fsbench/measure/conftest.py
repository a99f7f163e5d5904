"""Samplers made up for the tests of the measuring loop, and the loop with a fake timer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runner_doubles import SMALL, Log

from fsbench.discover import Found
from fsbench.measure.plan import Plan
from fsbench.measure.recorder import Recorder
from fsbench.measure.runner import Runner
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.records.cell import CellRecord
from fsbench.records.store import Store, read_records
from fsbench.timers.host import FakeTimer


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def sampler(log: Log) -> Callable[..., Found]:
    """Makes greedy samplers, which need no statistics to be right, that write to the log.

    fail: what it raises, by the stage: "build", "step" (every one) or a count of steps.
    """

    def make(
        name: str, fail: dict[Any, Exception] | None = None, shift: int = 0, **changes: Any
    ) -> Found:
        failing = fail or {}

        def build(problem: Problem, weight: torch.Tensor):
            log.append((name, "build", problem.B))
            log.weights.setdefault(name, []).append(weight.data_ptr())
            if "build" in failing:
                raise failing["build"]
            steps = 0

            def launch(hidden, seed, offset):
                nonlocal steps
                steps += 1
                log.append((name, "step", problem.B))
                log.offsets.setdefault(name, []).append(int(offset))
                for stage in ("step", steps):
                    if stage in failing:
                        raise failing[stage]
                return ((hidden @ weight.T).argmax(1) + shift) % problem.V

            return launch

        able = {"devices": ("cpu",), "dtypes": ("fp32", "bf16"), "zero_temperature": True}
        return Found(
            name,
            "test",
            Provider(
                name,
                f"Label {name}",
                changes.pop("kind", Kind.GREEDY),
                build,
                capabilities=Capabilities(**{**able, **changes.pop("able", {})}),
                **changes,
            ),
        )

    return make


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., dict[str, CellRecord]]:
    """Runs a plan in one folder, resuming it if it is there; returns the records by sampler."""

    def go(
        *providers: Found, problems: list[Problem] | None = None, timer: Any = None, **plan: Any
    ) -> dict[str, CellRecord]:
        folder = tmp_path / "run"
        store = (Store.resume if folder.exists() else Store.create)(folder, {})
        effort = {"warmup": 0, "iters": 3, "rounds": 3, "check": False, **plan}
        try:
            measuring = Plan(problems or [SMALL], list(providers), **effort)
            Runner(measuring, Recorder(store), timer or FakeTimer()).run()
        finally:
            store.close()
        assert read_records(folder) == store.records
        return {record.cell.provider: record for record in store.records}

    return go
