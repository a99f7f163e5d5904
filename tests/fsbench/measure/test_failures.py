"""A failing sampler costs only its cell; the gate before the timing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from runner_doubles import SMALL

from fsbench import inputs, verify
from fsbench.discover import Found
from fsbench.errors import (
    DeviceUnavailable,
    ProviderUnavailable,
    ResultsError,
    TimerUnavailable,
    UnsupportedProblem,
)
from fsbench.machine import device_state
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.records.store import Store, read_records
from fsbench.timers.host import FakeTimer


@pytest.mark.parametrize("stage", ["build", "step"])
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UnsupportedProblem("V is odd"), "unsupported", "V is odd"),
        (ProviderUnavailable("no licence"), "unavailable", "no licence"),
        (MemoryError(), "oom", "MemoryError"),
        (torch.OutOfMemoryError("no\nmemory"), "oom", "OutOfMemoryError: no memory"),
        (RuntimeError("x: can't allocate memory: 9 bytes"), "oom", "RuntimeError: x: can't"),
        (ZeroDivisionError("a\n  b"), "error", "ZeroDivisionError: a b"),
    ],
)
def test_a_sampler_that_raises_costs_only_its_own_cell(
    sampler, run, log, stage, error, status, reason
):
    records = run(sampler("A"), sampler("B", {stage: error}), sampler("C"))
    assert (records["B"].status, records["B"].rounds) == (status, {})
    assert records["B"].reason.startswith(reason) and "\n" not in records["B"].reason
    for name in "AC":
        assert records[name].status == "ok" and len(records[name].rounds) == 3
    assert log.steps().endswith("CAACAC")


def test_an_error_while_timing_keeps_the_rounds_before_it(sampler, run, log):
    # Step 1 builds, steps 2 and 3 are rounds 0 and 1.
    records = run(sampler("A", {4: RuntimeError("late")}), sampler("B"))
    assert (records["A"].status, records["A"].reason) == ("error", "RuntimeError: late")
    assert sorted(records["A"].rounds) == [0, 1]
    assert records["B"].status == "ok"


def test_a_timer_that_gives_up_is_named(sampler, run):
    class Broken(FakeTimer):
        def measure(self, step, iterations, before):
            raise TimerUnavailable("records were dropped")

    record = run(sampler("A"), timer=Broken())["A"]
    assert (record.status, record.reason) == ("timer_unavailable", "records were dropped")


def test_samplers_that_cannot_run_are_rows_with_a_reason(sampler, run, log):
    records = run(
        Found("broken", "", broken="SyntaxError: typo"),
        sampler("package", requires=("no_such_package",)),
        sampler("gpu", able={"devices": ("cuda",)}),
        sampler("dtype", able={"dtypes": ("bf16",)}),
        sampler("shape", supports=lambda problem: "V must be even"),
        sampler("crash", supports=lambda problem: 1 // 0),
    )
    assert {name: (record.status, record.reason) for name, record in records.items()} == {
        "broken": ("unavailable", "SyntaxError: typo"),
        "package": ("unavailable", "package no_such_package is not installed"),
        "gpu": ("unavailable", "runs on cuda only"),
        "dtype": ("unsupported", "takes bf16, not fp32"),
        "shape": ("unsupported", "V must be even"),
        "crash": ("error", "ZeroDivisionError: integer division or modulo by zero"),
    }
    assert log == []
    assert (records["broken"].cell.label, records["broken"].cell.kind) == ("broken", "")


def test_a_weight_that_does_not_fit_costs_the_cells_of_its_problem(
    sampler, run, tmp_path, monkeypatch
):
    real = inputs.make_weight

    def make_weight(problem, seed):
        if problem.V > 40:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(problem, seed)

    monkeypatch.setattr(inputs, "make_weight", make_weight)
    large = Problem(2, 16, 41, "fp32", device="cpu")
    run(sampler("A"), sampler("B"), problems=[large, SMALL])
    records = read_records(tmp_path / "run")
    assert {(record.cell.provider, record.cell.problem.V): record.status for record in records} == {
        ("A", 41): "oom",
        ("B", 41): "oom",
        ("A", 40): "ok",
        ("B", 40): "ok",
    }


def test_a_dead_gpu_ends_the_run(run, sampler, monkeypatch):
    def synchronize(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def build(problem, weight):
        monkeypatch.setattr(device_state, "synchronize", synchronize)
        raise RuntimeError("illegal access")

    able = Capabilities(devices=("cpu",), dtypes=("fp32",))
    deadly = Found("A", "", Provider("A", "A", Kind.EXACT, build, capabilities=able))
    with pytest.raises(DeviceUnavailable, match=r"any more .* after RuntimeError: illegal access"):
        run(deadly, sampler("B"))


def test_results_that_cannot_be_written_end_the_run(sampler, run, monkeypatch):
    def full(self, cell, line):
        raise ResultsError("cannot write results: No space left on device")

    monkeypatch.setattr(Store, "append", full)
    for providers in ([sampler("A")], [sampler("A", {"build": ValueError()})]):
        with pytest.raises(ResultsError, match="No space left"):
            run(*providers)


def test_a_wrong_sampler_is_not_timed(sampler, run, log):
    records = run(sampler("A", shift=1), sampler("B"), check=True)
    assert records["A"].status == "check_failed" and records["A"].rounds == {}
    assert records["A"].reason.startswith("greedy: B=3 V=2 row 0: expected ")
    assert records["B"].status == "ok"
    assert ("A", "step", SMALL.B) not in log  # stopped at the gate, before the problem's own build


def test_without_the_check_it_is_timed(sampler, run):
    assert run(sampler("A", shift=1), check=False)["A"].status == "ok"


def test_the_gate_is_asked_once_per_sampler_dtype_and_temperature(sampler, run, monkeypatch):
    requested = []

    def no_checks(provider, setting, begin):
        requested.append((provider.name, setting.dtype, setting.temperature))
        return iter(())

    monkeypatch.setattr(verify, "verify", no_checks)
    problems = [
        Problem(B, 16, 40, dtype, temperature, "cpu")
        for dtype, temperature in (("fp32", 1.0), ("bf16", 1.0), ("fp32", 0.5))
        for B in (1, 2)
    ]
    run(sampler("A"), sampler("B"), problems=problems, check=True)
    assert requested == [
        (name, dtype, temperature)
        for dtype, temperature in (("fp32", 1.0), ("bf16", 1.0), ("fp32", 0.5))
        for name in "AB"
    ]


def test_the_launch_that_is_timed_is_checked_too(sampler, run, monkeypatch):
    monkeypatch.setattr(verify, "verify", lambda *_, **__: iter(()))
    record = run(sampler("A", shift=1), check=True)["A"]
    assert record.status == "check_failed" and record.reason.startswith("problem: ")


def test_a_lower_bound_is_not_verified(sampler, run, monkeypatch):
    monkeypatch.setattr(verify, "verify", lambda *_, **__: 1 / 0)
    record = run(sampler("A", shift=1, kind=Kind.LOWER_BOUND), check=True)["A"]
    assert record.status == "ok" and len(record.rounds) == 3


def test_a_sampler_that_cannot_do_the_shapes_of_the_checks_is_unsupported(sampler, run):
    only = sampler("A", supports=lambda problem: None if problem.V == 40 else "V must be 40")
    record = run(only, check=True)["A"]
    assert record.status == "unsupported" and "V must be 40" in record.reason
    assert run(only, check=False)["A"].status == "ok"


@pytest.mark.parametrize("name", ["weight", "scale"])
def test_a_quantized_head_is_made_once_and_kept_intact(sampler, run, name):
    arguments, seen = [], []

    def build(writes, problem, head):
        arguments.append(head)

        def launch(hidden, seed, offset):
            seen.append(float((head.weight.float() * head.scale[:, None]).sum()))
            if writes:
                getattr(head, name).add_(1)
            return hidden.argmax(1)

        return launch

    result = []
    for letter, writes in (("A", True), ("B", False)):
        made = sampler(letter, able={"quantized": ("int8",)})
        writer = replace(made.provider, build=partial(build, writes))
        result.append(replace(made, provider=writer))
    problems = [replace(SMALL, B=B, weights="int8") for B in (1, 2)]
    records = run(*result, sampler("C"), problems=problems)
    assert records["A"].reason == f"it writes into head.{name}"
    assert [records[letter].status for letter in "ABC"] == ["check_failed", "ok", "ok"]
    assert all(each is arguments[0] for each in arguments) and len(set(seen)) == 1


@pytest.mark.parametrize(
    ("name", "when", "fails"),
    [
        *(("weight", when, fails) for when in (1, 2, 4) for fails in (False, True)),
        *((name, when, when == 2) for name in ("hidden", "seed", "offset") for when in (1, 2, 4)),
    ],
)
def test_a_sampler_that_writes_into_the_inputs_costs_its_own_cell(
    sampler, run, log, name, when, fails
):
    """In its first step, in round 0 or in round 2; and the others read what they should."""
    seen = []

    def build(problem, weight):
        steps = 0

        def launch(hidden, seed, offset):
            nonlocal steps
            steps += 1
            tensors = {"weight": weight, "hidden": hidden, "seed": seed, "offset": offset}
            if steps == when:
                tensors[name].view(-1)[-1] += 1
                if fails:
                    raise RuntimeError("it fails, too")
            return hidden.argmax(1)

        return launch

    def watching(problem, weight):
        def launch(hidden, seed, offset):
            seen.append((float(weight.sum()), float(hidden.sum()), int(seed)))
            return hidden.argmax(1)

        return launch

    writer, watcher = (
        replace(sampler(letter), provider=replace(sampler(letter).provider, build=each))
        for letter, each in (("A", build), ("B", watching))
    )
    if name == "weight" and when == 1:
        return_at_build = replace(writer.provider, build=lambda p, w: (w.zero_(), build(p, w))[1])
        writer = replace(writer, provider=return_at_build)
    records = run(writer, watcher, sampler("C"))
    assert records["A"].status == "check_failed"
    assert records["A"].reason == f"it writes into {name}"
    assert [records[each].status for each in "BC"] == ["ok", "ok"]
    assert len(set(seen)) == 1
    assert log.offsets["C"] == sorted(set(log.offsets["C"]))
