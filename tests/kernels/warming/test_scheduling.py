"""The order in which calls are made and kernels compiled, with functions in place of compilers."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from fsbench.kernels.warming import offline
from fsbench.kernels.warming.offline import CHIPS, Launch, compile_with_forks


@pytest.fixture
def run(monkeypatch):
    """Compile for calls that are given as the kernels that each launches; return the events."""
    monkeypatch.setattr(offline, "use_cpu_guard", lambda: None)
    compilers: dict[str, Any] = {}
    events: list[Any] = []

    def launches_of(chip, call):
        names = call()
        events.append(("called", *names))
        return {
            ("module", name): Launch(SimpleNamespace(), name, partial(compilers.get(name, int)))
            for name in names
        }

    monkeypatch.setattr(offline, "_launches_of", launches_of)

    def run_calls(*calls: tuple[str, ...], processes: int = 1, **by_name: Any) -> list[Any]:
        compilers.update(by_name)
        functions = [partial(tuple, names) for names in calls]
        on_ready = partial(_append, events)
        for kernel in compile_with_forks(CHIPS["h100"], functions, processes, on_ready):
            events.append(kernel)
        return events

    return run_calls


def _append(events: list[Any], number: int) -> None:
    events.append(("ready", number))


def test_a_call_is_ready_before_kernels_of_later_calls_are_compiled(run):
    """An engine waits for the first kinds only."""
    events = run(("a",), ("a", "b"), ("c",), c=partial(time.sleep, 0.5))
    ready = [events.index(("ready", number)) for number in range(3)]
    (compiled_c,) = [i for i, event in enumerate(events) if getattr(event, "number", 0) == 3]
    assert ready[0] < ready[1] < compiled_c < ready[2]


def test_calls_are_made_once_and_kernels_compiled_once(run):
    events = run(("a", "b"), ("b", "a"), ("b", "c"), processes=3)
    assert [event for event in events if event[0] == "called"] == [
        ("called", "a", "b"),
        ("called", "b", "a"),
        ("called", "b", "c"),
    ]
    kernels = [event for event in events if isinstance(event, offline.Compiled)]
    assert [kernel.number for kernel in kernels] == [1, 2, 3]
    assert sorted(kernel.call for kernel in kernels) == [0, 0, 2]


def test_a_call_that_launches_no_new_kernel_becomes_ready(run):
    assert ("ready", 1) in run(("a",), ("a",))


def fail() -> None:
    raise ValueError("no such instruction")


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        (fail, "no such instruction"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "a process that compiles died"),
    ],
)
def test_a_kernel_that_does_not_compile_stops_the_others(run, compiler, message):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=message):
        run(("slow", "bad"), processes=2, slow=partial(time.sleep, 60), bad=compiler)
    assert time.monotonic() - start < 50


def test_the_call_that_fails_is_named(run, monkeypatch):
    monkeypatch.setattr(offline, "_launches_of", lambda chip, call: fail())
    with pytest.raises(RuntimeError, match=r"call 0 of 1: .*no such instruction"):
        run(("a",))
