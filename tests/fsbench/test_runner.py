"""The measuring loop with a fake timer and samplers made up for the purpose."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fsbench import caches, device_state, inputs, preparing, runner, verify
from fsbench.discover import Found
from fsbench.errors import (
    DeviceUnavailable,
    InvalidArgument,
    ProviderUnavailable,
    ResultsError,
    TimerUnavailable,
    UnsupportedProblem,
)
from fsbench.plan import Plan
from fsbench.preparing import spread_seed
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.results import CellRecord, Energy, Store, read_records
from fsbench.runner import Runner
from fsbench.timers.fake import FakeTimer

SMALL = Problem(2, 16, 40, "fp32", device="cpu")


class Log(list[tuple[Any, ...]]):
    """What happened, in order: (sampler, "build" or "step", B) and offsets by sampler."""

    def __init__(self) -> None:
        self.offsets: dict[str, list[int]] = {}
        self.weights: dict[str, list[int]] = {}

    def steps(self) -> str:
        """The samplers stepped, one letter each."""
        return "".join(name for name, what, _ in self if what == "step")


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
            Runner(measuring, store, timer or FakeTimer()).run()
        finally:
            store.close()
        assert read_records(folder) == store.records
        return {record.cell.provider: record for record in store.records}

    return go


def _lines(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "points.jsonl").open()]


# The plan


@pytest.mark.parametrize(("iters", "rounds"), [(100, 5), (7, 3), (5, 5), (1, 1), (11, 4)])
def test_iterations_add_up_and_differ_by_one_at_most(iters, rounds):
    plan = Plan([SMALL], [], iters=iters, rounds=rounds)
    counts = [plan.iterations(number) for number in range(rounds)]
    assert sum(counts) == iters
    assert min(counts) >= 1 and max(counts) <= min(counts) + 1
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iters": 4, "rounds": 5}, r"^--iters: expected at least one step .* --rounds 5; got 4$"),
        ({"iters": 0, "rounds": 1}, r"^--iters: expected an integer >= 1; got 0$"),
        ({"rounds": 0}, r"^--rounds: expected an integer >= 1; got 0$"),
        ({"warmup": -1}, r"^--warmup: expected an integer >= 0; got -1$"),
        ({"seed": 2**63}, r"^--seed: expected an integer of 64 bits; got 9223372036854775808$"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_refused(changes, message):
    with pytest.raises(InvalidArgument, match=message):
        Plan([SMALL], [], **changes)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_any_int64_is_a_seed(sampler, run, seed):
    assert run(sampler("A"), seed=seed)["A"].status == "ok"


def test_spread_seed_is_splitmix64():
    # First outputs of splitmix64 for the states 0 and 1 (prng.di.unimi.it), as signed integers.
    assert spread_seed(0) % 2**64 == 0xE220A8397B1DCDAF
    assert spread_seed(1) % 2**64 == 0x910A2DEC89025CC1
    assert all(-(2**63) <= spread_seed(seed) < 2**63 for seed in range(-50, 50))


# Measuring


def test_samplers_take_turns_in_rounds(sampler, run, log):
    run(sampler("A"), sampler("B"), iters=5, rounds=3)
    # One step each to build, then rounds of 2, 2 and 1 steps.
    assert log.steps() == "AB" + "AABB" + "AABB" + "AB"


def test_warmup_comes_before_any_timing(sampler, run, log):
    run(sampler("A"), sampler("B"), warmup=2, iters=2, rounds=2)
    assert log.steps() == "AAABBB" + "ABAB"


def test_every_timed_step_has_an_offset_of_its_own(sampler, run, log):
    run(sampler("A"), sampler("B"), warmup=1, iters=4, rounds=2)
    assert log.offsets == {"A": [0, 0, 1, 2, 5, 6], "B": [0, 0, 3, 4, 7, 8]}


def test_the_samples_are_the_timers(sampler, run):
    timer = FakeTimer(50.0, jitter=0.0)
    record = run(sampler("A"), timer=timer, iters=5, rounds=2)["A"]
    assert {number: part.span_us for number, part in record.rounds.items()} == {
        0: [50.0] * 3,
        1: [50.0] * 2,
    }
    cell = record.cell
    assert (cell.b, cell.d, cell.v, cell.dtype, cell.device) == (2, 16, 40, "fp32", "cpu")
    assert (cell.label, cell.kind, cell.fused) == ("Label A", "greedy", False)
    assert (cell.timer, cell.graph, cell.l2, cell.gpu) == ("fake", False, "n/a", "")


def test_the_config_of_a_launch_is_recorded(run):
    def build(problem, weight):
        def launch(hidden, seed, offset):
            return torch.zeros(problem.B, dtype=torch.int64)

        launch.config = "BLOCK 64"
        return launch

    able = Capabilities(devices=("cpu",), dtypes=("fp32",))
    record = run(Found("A", "", Provider("A", "A", Kind.EXACT, build, capabilities=able)))["A"]
    assert record.rounds[0].config == "BLOCK 64"


def test_problems_of_one_shape_share_the_weight(sampler, run, log, monkeypatch):
    made = []
    real = inputs.make_weight
    monkeypatch.setattr(
        inputs, "make_weight", lambda problem, seed: made.append(problem) or real(problem, seed)
    )
    problems = [
        *(Problem(B, 16, 40, "fp32", device="cpu") for B in (1, 2, 4)),
        Problem(1, 16, 41, "fp32", device="cpu"),
    ]
    run(sampler("A"), problems=problems)
    assert made == [problems[0], problems[3]]
    assert log.weights["A"][0] == log.weights["A"][1] == log.weights["A"][2]


def test_the_old_weight_is_freed_before_the_next_is_made(sampler, run, monkeypatch):
    import gc
    import weakref

    alive: list[weakref.ref] = []
    real = inputs.make_weight

    def make_weight(problem, seed):
        gc.collect()
        assert not [ref for ref in alive if ref() is not None]
        weight = real(problem, seed)
        alive.append(weakref.ref(weight))
        return weight

    monkeypatch.setattr(inputs, "make_weight", make_weight)
    problems = [Problem(1, 16, V, "fp32", device="cpu") for V in (40, 41, 42)]
    records = run(sampler("A"), sampler("B"), problems=problems)
    assert len(alive) == 3 and {record.status for record in records.values()} == {"ok"}


def test_progress_counts_up_to_all_cells(sampler, tmp_path):
    seen = []
    plan = Plan(
        [SMALL, Problem(3, 16, 40, "fp32", device="cpu")],
        [sampler("A"), sampler("B", {"build": ValueError("no")}), Found("C", "", broken="gone")],
        warmup=0,
        iters=4,
        rounds=4,
        check=False,
    )
    store = Store.create(tmp_path, {})
    report = lambda done, total, what: seen.append((done, total, what))  # noqa: E731
    Runner(plan, store, FakeTimer(), report=report).run()
    store.close()
    done = [entry[0] for entry in seen]
    assert done == sorted(done) and done[-1] == 6
    assert {entry[1] for entry in seen} == {6}
    assert any("Label A, round 4 of 4" in entry[2] for entry in seen)


# What can go wrong with a sampler


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
    assert log.steps().endswith("ACACAC")


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
    assert {(record.cell.provider, record.cell.v): record.status for record in records} == {
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
    def full(self, line):
        raise ResultsError("cannot write results: No space left on device")

    monkeypatch.setattr(Store, "_append", full)
    for providers in ([sampler("A")], [sampler("A", {"build": ValueError()})]):
        with pytest.raises(ResultsError, match="No space left"):
            run(*providers)


# The gate


def test_a_wrong_sampler_is_not_timed(sampler, run, log):
    records = run(sampler("A", shift=1), sampler("B"), check=True)
    assert records["A"].status == "check_failed" and records["A"].rounds == {}
    assert records["A"].reason.startswith("greedy: B=3 V=2 row 0: expected ")
    assert records["B"].status == "ok"
    assert ("A", "step", SMALL.B) not in log  # stopped at the gate, before the problem's own build


def test_without_the_check_it_is_timed(sampler, run):
    assert run(sampler("A", shift=1), check=False)["A"].status == "ok"


def test_the_gate_is_asked_once_per_sampler_dtype_and_temperature(sampler, run, monkeypatch):
    asked = []

    def once(provider, setting):
        asked.append((provider.name, setting.dtype, setting.temperature))
        return iter(())

    monkeypatch.setattr(verify, "verify", once)
    problems = [
        Problem(B, 16, 40, dtype, temperature, "cpu")
        for dtype, temperature in (("fp32", 1.0), ("bf16", 1.0), ("fp32", 0.5))
        for B in (1, 2)
    ]
    run(sampler("A"), sampler("B"), problems=problems, check=True)
    assert asked == [
        (name, dtype, temperature)
        for dtype, temperature in (("fp32", 1.0), ("bf16", 1.0), ("fp32", 0.5))
        for name in "AB"
    ]


def test_the_launch_that_is_timed_is_checked_too(sampler, run, monkeypatch):
    monkeypatch.setattr(verify, "verify", lambda provider, setting: iter(()))
    record = run(sampler("A", shift=1), check=True)["A"]
    assert record.status == "check_failed" and record.reason.startswith("problem: ")


def test_a_lower_bound_is_not_verified(sampler, run, monkeypatch):
    monkeypatch.setattr(verify, "verify", lambda provider, setting: 1 / 0)
    record = run(sampler("A", shift=1, kind=Kind.LOWER_BOUND), check=True)["A"]
    assert record.status == "ok" and len(record.rounds) == 3


def test_a_sampler_that_cannot_do_the_shapes_of_the_checks_is_unsupported(sampler, run):
    only = sampler("A", supports=lambda problem: None if problem.V == 40 else "V must be 40")
    record = run(only, check=True)["A"]
    assert record.status == "unsupported" and "V must be 40" in record.reason
    assert run(only, check=False)["A"].status == "ok"


# Resuming


def test_resuming_measures_only_the_rounds_that_are_missing(sampler, run, log, tmp_path):
    run(sampler("A"), sampler("B", {3: RuntimeError("once")}), rounds=3)
    log.clear()
    records = run(sampler("A"), sampler("B"), sampler("C"), rounds=3)
    # A is complete and is not even built; B lacks rounds 1 and 2, C all of them.
    assert log.steps() == "BC" + "C" + "BC" + "BC"
    assert {name: len(record.rounds) for name, record in records.items()} == {
        "A": 3,
        "B": 3,
        "C": 3,
    }
    assert records["B"].status == "ok"
    keys = [(x["cell"]["provider"], x["round"]) for x in _lines(tmp_path) if "round" in x]
    assert sorted(keys) == [(name, number) for name in "ABC" for number in range(3)]


def test_resuming_a_complete_run_does_nothing(sampler, run, log, tmp_path, monkeypatch):
    run(sampler("A"))
    before = (tmp_path / "run" / "points.jsonl").read_bytes()
    log.clear()
    monkeypatch.setattr(inputs, "make_weight", lambda problem, seed: 1 / 0)
    run(sampler("A"))
    assert log == []
    assert (tmp_path / "run" / "points.jsonl").read_bytes() == before


def test_resuming_tries_again_what_failed_and_does_not_repeat_the_same_reason(
    sampler, run, log, tmp_path
):
    for _ in range(3):
        run(sampler("A", {"build": ValueError("no")}), Found("B", "", broken="gone"))
    assert [(x["cell"]["provider"], x["status"]) for x in _lines(tmp_path)] == [
        ("B", "unavailable"),
        ("A", "error"),
    ]
    assert run(sampler("A"), sampler("B"))["B"].status == "ok"


def test_more_rounds_extend_a_run(sampler, run, log):
    run(sampler("A"), iters=2, rounds=2)
    record = run(sampler("A"), iters=4, rounds=4)["A"]
    assert sorted(record.rounds) == [0, 1, 2, 3]
    assert log.steps() == "A" + "AA" + "A" + "AA"


@pytest.mark.parametrize(
    ("device", "asked", "able", "expected"),
    [
        ("cuda", True, True, True),
        ("cuda", True, False, False),
        ("cuda", False, True, False),
        ("cpu", True, True, False),
    ],
)
def test_a_cell_says_whether_a_graph_is_replayed(sampler, tmp_path, device, asked, able, expected):
    plan = Plan([SMALL], [], graph=asked)
    made = Runner(plan, Store(tmp_path, {}), FakeTimer(), gpu_name="NVIDIA H200")
    cell = made.cell(sampler("A", able={"graph_safe": able}), Problem(1, 2, 3, device=device))
    assert (cell.graph, cell.gpu, cell.device) == (expected, "NVIDIA H200", device)


# What is measured beside the time


class Stopwatch(FakeTimer):
    """The time of a step is what the sampler said that it took."""

    def __init__(self) -> None:
        self.took = 100.0
        super().__init__(lambda: self.took, jitter=0.0)


@pytest.fixture
def fused(log):
    """A fused sampler whose noise takes 10 us, and whose argmax takes 5 us."""

    def make(timer, able=None, fail=(), **changes):
        def build(problem, weight, time=None):
            time = time or (100.0 if problem.temperature else 90.0)
            name = {100.0: "f", 90.0: "g", 85.0: "m"}[time]

            def launch(hidden, seed, offset):
                if name in fail:
                    raise RuntimeError(f"no {name} today")
                timer.took = time
                log.append((name, "step", problem.B))
                return (hidden @ weight.T).argmax(1)

            return launch

        able = {
            **dict(devices=("cpu",), dtypes=("fp32",), fused=True, zero_temperature=True),
            **(able or {}),
        }
        provider = Provider(
            "f", "F", Kind.EXACT, build, capabilities=Capabilities(**able), **changes
        )
        return Found("f", "test", provider), partial(build, time=85.0)

    return make


def test_forms_of_a_fused_sampler_take_turns_with_it(run, fused, sampler, log):
    timer = Stopwatch()
    entry, _ = fused(timer)
    records = run(entry, sampler("x"), timer=timer, forms=True, rounds=2, iters=2)
    assert log.steps() == "fx" + 2 * "fgx"  # the first ones while they are built
    assert {form: sorted(rounds) for form, rounds in records["f"].forms.items()} == {
        "greedy": [0, 1]
    }
    assert records["f"].forms["greedy"][1].span_us == [90.0]
    assert records["f"].rounds[1].span_us == [100.0]
    assert not records["x"].forms and not records["x"].lacks  # stores its logits: names tell


def test_the_matmul_form_is_the_providers_own(run, fused):
    timer = Stopwatch()
    _, matmul = fused(timer)
    entry, _ = fused(timer, matmul_form=matmul, able={"zero_temperature": False})
    records = run(entry, timer=timer, forms=True)
    assert list(records["f"].forms) == ["matmul"]
    assert records["f"].forms["matmul"][0].span_us == [85.0]


@pytest.mark.parametrize("problem", [replace(SMALL, temperature=0.0)])
def test_greedy_sampling_has_no_greedy_form(run, fused, problem):
    timer = Stopwatch()
    assert not run(fused(timer)[0], problems=[problem], timer=timer, forms=True)["f"].forms


def test_without_being_asked_for_there_are_no_forms(run, fused):
    timer = Stopwatch()
    assert not run(fused(timer)[0], timer=timer)["f"].forms


def test_a_form_that_fails_costs_the_form_only(run, fused):
    timer = Stopwatch()
    record = run(fused(timer, fail=("g",))[0], timer=timer, forms=True)["f"]
    assert (record.status, sorted(record.rounds)) == ("ok", [0, 1, 2])
    assert not record.forms
    assert record.lacks == {"greedy": "RuntimeError: no g today"}


def test_resume_measures_the_forms_that_are_missing_and_nothing_else(run, fused, log):
    timer = Stopwatch()
    entry, _ = fused(timer)
    run(entry, timer=timer)
    log.clear()
    records = run(entry, timer=timer, forms=True)
    assert log.steps().count("f") == 1  # it is built again, as its forms are, but not timed
    assert sorted(records["f"].forms["greedy"]) == [0, 1, 2]
    log.clear()
    run(entry, timer=timer, forms=True)
    assert not log


def test_the_first_call_and_what_was_warm(run, sampler, monkeypatch, tmp_path):
    monkeypatch.setattr(caches, "filled", lambda: ["triton"])
    ticks = iter(range(0, 1000, 7))
    monkeypatch.setattr(preparing.time, "perf_counter", lambda: next(ticks))
    problems = [SMALL, replace(SMALL, B=3)]
    run(sampler("a"), problems=problems, check=False)
    measured = [line["measured"] for line in _lines(tmp_path)]
    assert [each["first_call_s"] for each in measured] == [7] * 6
    assert [each["warm"] for each in measured] == 3 * [["triton"]] + 3 * [["triton", "process"]]


def test_a_sampler_that_was_verified_is_not_cold(run, sampler, tmp_path):
    run(sampler("a"), check=True)
    assert _lines(tmp_path)[0]["measured"]["warm"][-1] == "process"


@pytest.fixture
def counter(monkeypatch):
    """A counter of energy, and a measurement that asks it and takes three steps."""

    def energy(queue, counter_mj, seconds, idle_w):
        for _ in range(3):
            queue(1)
        return Energy(counter_mj() / 1e3, seconds, 3, idle_w)

    monkeypatch.setattr(runner.hardware, "energy_mj", lambda index: 6000)
    monkeypatch.setattr(runner.energy, "energy", energy)
    monkeypatch.setattr(runner.energy, "idle_watts", lambda counter_mj: 88.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None))


def test_energy_comes_after_all_timing_of_a_problem(run, sampler, log, counter):
    records = run(sampler("a"), sampler("b"), energy_s=1.5)
    assert log.steps() == "ab" + 3 * "ab" + "aaabbb"
    assert records["a"].energy == Energy(6.0, 1.5, 3, 88.0)
    assert log.offsets["a"] == sorted(set(log.offsets["a"]))  # fresh noise here, too
    log.clear()
    run(sampler("a"), sampler("b"), energy_s=1.5)
    assert not log


def test_energy_that_cannot_be_measured_costs_the_energy_only(run, sampler, counter, monkeypatch):
    def fails(*arguments):
        raise DeviceUnavailable("energy: the counter stood still")

    monkeypatch.setattr(runner.energy, "energy", fails)
    record = run(sampler("a"), energy_s=1.0)["a"]
    assert (record.status, len(record.rounds), record.energy) == ("ok", 3, None)
    assert "the counter stood still" in record.lacks["energy"]


def test_without_a_counter_of_energy_nothing_is_measured(run, sampler, log):
    with pytest.raises(DeviceUnavailable, match="--energy"):
        run(sampler("a"), energy_s=1.0)
    assert not log
