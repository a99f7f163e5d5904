"""Measurements in addition to the time of a step: forms, first calls, energy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from runner_doubles import SMALL, lines

from fsbench.discover import Found
from fsbench.errors import DeviceUnavailable
from fsbench.machine import caches
from fsbench.measure import preparation, runner
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.records.cell import Loop
from fsbench.timers.host import FakeTimer


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
    assert log.steps() == "fx" + "xfg" + "fgx"  # the first ones while they are built
    assert {form: sorted(rounds) for form, rounds in records["f"].forms.items()} == {
        "greedy": [0, 1]
    }
    assert records["f"].forms["greedy"][1].span_us == [90.0]
    assert records["f"].rounds[1].span_us == [100.0]
    assert (
        not records["x"].forms and not records["x"].lacks
    )  # stores its logits: split by kernel names


def test_the_matmul_form_is_the_providers_own(run, fused):
    timer = Stopwatch()
    _, matmul = fused(timer)
    entry, _ = fused(timer, matmul_form=matmul, able={"zero_temperature": False})
    records = run(entry, timer=timer, forms=True)
    assert list(records["f"].forms) == ["matmul"]
    assert records["f"].forms["matmul"][0].span_us == [85.0]


def test_greedy_sampling_and_a_run_without_forms_have_none(run, fused):
    timer = Stopwatch()
    assert not run(fused(timer)[0], timer=timer)["f"].forms
    greedy = replace(SMALL, temperature=0.0)
    assert not run(fused(timer)[0], problems=[greedy], timer=timer, forms=True)["f"].forms


def test_a_form_that_fails_does_not_affect_the_cell(run, fused):
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


def test_the_first_call_and_the_warm_caches_are_recorded(run, sampler, monkeypatch, tmp_path):
    monkeypatch.setattr(caches, "filled", lambda: ["triton"])
    ticks = iter(range(0, 1000, 7))
    monkeypatch.setattr(preparation.time, "perf_counter", lambda: next(ticks))
    problems = [SMALL, replace(SMALL, B=3)]
    run(sampler("a"), problems=problems, check=False)
    run(sampler("verified"), check=True)
    measured = [line["measured"] for line in lines(tmp_path)]
    assert [each["first_call_s"] for each in measured[:6]] == [7] * 6
    warm = 3 * [["triton"]] + 6 * [["triton", "process"]]
    assert [each["warm"] for each in measured] == warm


@pytest.fixture
def counter(monkeypatch):
    """A counter of energy, and a measurement that asks it and takes three steps."""

    def energy(queue, counter_mj, seconds, idle_w):
        for _ in range(3):
            queue(1)
        return Loop(3, seconds, counter_mj() / 1e3, idle_w)

    monkeypatch.setattr(runner.hardware, "energy_mj", lambda index: 6000)
    monkeypatch.setattr(runner.loops, "run_loop", energy)
    monkeypatch.setattr(runner.loops, "idle_watts", lambda counter_mj: 88.0)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: None))


def test_energy_comes_after_all_timing_of_a_problem(run, sampler, log, counter):
    records = run(sampler("a"), sampler("b"), energy_s=1.5)
    assert log.steps() == "ab" + "abbaba" + "aaabbb"
    assert records["a"].energy == Loop(3, 1.5, 6.0, 88.0)
    assert log.offsets["a"] == sorted(set(log.offsets["a"]))  # fresh noise here, too
    log.clear()
    run(sampler("a"), sampler("b"), energy_s=1.5)
    assert not log


def test_energy_that_cannot_be_measured_costs_the_energy_only(run, sampler, counter, monkeypatch):
    def fails(*arguments):
        raise DeviceUnavailable("energy: the counter stood still")

    monkeypatch.setattr(runner.loops, "run_loop", fails)
    record = run(sampler("a"), energy_s=1.0)["a"]
    assert (record.status, len(record.rounds), record.energy) == ("ok", 3, None)
    assert "the counter stood still" in record.lacks["energy"]


def test_sustained_steps_come_after_all_else_also_on_a_cpu(run, sampler, log, monkeypatch):
    monkeypatch.setattr(runner.loops, "LEAD_S", 0.0)
    records = run(sampler("a"), sampler("b"), sustained_s=0.5)
    steps = log.steps()
    assert steps[8:] == steps[8:].count("a") * "a" + steps[8:].count("b") * "b"
    for record in records.values():
        assert 0 < record.sustained.seconds < 1e3
        assert record.sustained.steps >= 1 and record.sustained.joules is None
    log.clear()
    run(sampler("a"), sampler("b"), sustained_s=0.5)
    assert not log


def test_sustained_steps_that_fail_cost_themselves_only(run, sampler, log):
    record = run(sampler("a", {5: RuntimeError("hot")}), sustained_s=0.5)["a"]
    assert (record.status, len(record.rounds), record.sustained) == ("ok", 3, None)
    assert record.lacks == {"sustained": "RuntimeError: hot"}


def test_without_a_counter_of_energy_nothing_is_measured(run, sampler, log):
    with pytest.raises(DeviceUnavailable, match="--energy"):
        run(sampler("a"), energy_s=1.0)
    assert not log


def test_the_host_time_of_an_eager_call_is_measured_once_where_a_call_does_not_wait(
    run, sampler, log, monkeypatch
):
    assert run(sampler("a"))["a"].host is None  # on a CPU
    monkeypatch.setattr(runner, "is_asynchronous", lambda device: True)
    failing = sampler("c", {5: RuntimeError("hot")})
    records = run(sampler("b"), failing)
    assert records["b"].host.call_us > 0
    assert records["b"].host.calls == len(log.offsets["b"]) - 4  # a first call and three rounds
    assert (records["c"].host, records["c"].lacks) == (None, {"host": "RuntimeError: hot"})
    log.clear()
    run(sampler("b"))
    assert not log


@pytest.mark.parametrize(("slow_s", "queues"), [(0.01, 9), (0.03, 2)])
def test_host_time_is_the_median_of_queued_calls(slow_s, queues):
    now, waits = 0.0, []

    def call():
        nonlocal now
        now += slow_s if len(waits) == 2 else 20e-6  # the second queue was full

    result = runner.loops.host_time(call, lambda: waits.append(now), lambda: now)
    assert len(waits) == queues + 1 and result.calls == queues * runner.loops.HOST_CALLS
    assert result.call_us == pytest.approx(20 if queues > 2 else (slow_s * 1e6 + 20) / 2)
