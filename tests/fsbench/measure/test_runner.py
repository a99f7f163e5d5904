"""The measuring loop: whose turn it is, on which inputs; and what a resumed run adds."""

from __future__ import annotations

import pytest
import torch
from runner_doubles import SMALL, lines

from fsbench import inputs
from fsbench.discover import Found
from fsbench.measure.plan import Plan
from fsbench.measure.recorder import Recorder
from fsbench.measure.runner import Runner
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.records.cell import Conditions
from fsbench.records.store import Store
from fsbench.timers import gpu
from fsbench.timers.host import FakeTimer


def test_samplers_take_turns_in_rounds(sampler, run, log):
    run(sampler("A"), sampler("B"), iters=5, rounds=3)
    # One step each to build, then rounds of 2, 2 and 1 steps.
    assert log.steps() == "AB" + "BBAA" + "AABB" + "BA"


def test_the_order_is_another_in_every_round_and_recorded(sampler, run, log):
    names = "ABCDE"
    records = run(*map(sampler, names), iters=6, rounds=6)
    done = log.steps()[len(names) :]
    orders = [done[cell_ : cell_ + len(names)] for cell_ in range(0, len(done), len(names))]
    assert len(set(orders)) == 6 and {"".join(sorted(order)) for order in orders} == {names}
    assert [order[::-1] for order in orders[::2]] == orders[1::2]
    for number, order in enumerate(orders):
        assert [records[name].rounds[number].turn for name in order] == [0, 1, 2, 3, 4]


def test_the_order_is_of_the_seed(sampler):
    orders = {tuple(Plan([SMALL], [], seed=seed).turns("ABCDE", 0)) for seed in range(20)}
    assert len(orders) > 10


def test_resuming_keeps_the_order_of_a_round(sampler, run, log, tmp_path):
    names = "ABCDE"
    whole = run(*map(sampler, names))
    order = Plan([SMALL], []).turns(names, 1)
    path = tmp_path / "run" / "points.jsonl"
    path.write_text("".join(path.read_text().splitlines(True)[:7]))  # two of the second round
    log.clear()
    resumed = run(*map(sampler, names))
    assert log.steps()[5:8] == "".join(order[2:])
    for name, record in resumed.items():
        turns = [record.rounds[number].turn for number in range(3)]
        assert turns == [whole[name].rounds[number].turn for number in range(3)]


def test_warmup_comes_before_any_timing(sampler, run, log):
    run(sampler("A"), sampler("B"), warmup=2, iters=2, rounds=2)
    assert log.steps() == "AAABBB" + "BAAB"


def test_every_timed_step_has_an_offset_of_its_own(sampler, run, log):
    run(sampler("A"), sampler("B"), warmup=1, iters=4, rounds=2)
    assert log.offsets == {"A": [0, 0, 3, 4, 5, 6], "B": [0, 0, 1, 2, 7, 8]}


def test_the_samples_are_the_timers(sampler, run):
    timer = FakeTimer(50.0, jitter=0.0)
    record = run(sampler("A"), timer=timer, iters=5, rounds=2)["A"]
    assert {number: part.span_us for number, part in record.rounds.items()} == {
        0: [50.0] * 3,
        1: [50.0] * 2,
    }
    cell = record.cell
    assert cell.problem == SMALL and cell.conditions == Conditions("", "fake", False, "n/a")
    assert (cell.label, cell.kind, cell.fused) == ("Label A", "greedy", False)


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


@pytest.mark.parametrize("rounds", [2, 4])
def test_progress_counts_up_to_all_cells(sampler, tmp_path, rounds):
    seen = []
    plan = Plan(
        [SMALL, Problem(3, 16, 40, "fp32", device="cpu")],
        [sampler("A"), sampler("B", {"build": ValueError("no")}), Found("C", "", broken="gone")],
        warmup=0,
        iters=rounds,
        rounds=rounds,
        check=False,
    )
    store = Store.create(tmp_path, {})
    report = lambda *progress: seen.append(progress)  # noqa: E731
    Runner(plan, Recorder(store, report), FakeTimer()).run()
    store.close()
    done = [entry[0] for entry in seen]
    assert done == sorted(done) and done[-1] == 6
    assert done[-2] == 6  # the last cell: no part of it is left by rounding
    assert {entry[1] for entry in seen} == {6}
    assert any(f"Label A, round {rounds} of {rounds}" in entry[2] for entry in seen)


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
    keys = [(x["cell"]["provider"], x["round"]) for x in lines(tmp_path) if "round" in x]
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
    assert [(x["cell"]["provider"], x["status"]) for x in lines(tmp_path)] == [
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
    ("device", "requested", "able", "expected"),
    [
        ("cuda", True, True, True),
        ("cuda", True, False, False),
        ("cuda", False, True, False),
        ("cpu", True, True, False),
    ],
)
def test_a_cell_records_whether_a_graph_is_replayed(sampler, device, requested, able, expected):
    plan = Plan([SMALL], [], graph=requested)
    entry = sampler("A", able={"graph_safe": able})
    cell = plan.cell(entry, Problem(1, 2, 3, device=device), "NVIDIA H200", "cupti", "cold")
    assert cell.conditions == Conditions("NVIDIA H200", "cupti", expected, "cold")


def test_the_clock_during_a_round_is_of_readings_right_around_it(sampler, tmp_path):
    """Three multiprocessors count 1500, 1600 and 1700 cycles per us; a fourth had no program."""
    output = []

    class Timer(FakeTimer):
        def measure(self, *arguments):
            output.append("timed")
            return super().measure(*arguments)

    def read_clock():
        us = 1000 + 500 * len(output)
        output.append("read")
        return torch.tensor([[us * mhz, 1000 * us] for mhz in (1500, 1600, 1700)] + [[0, 0]])

    store = Store.create(tmp_path, {})
    plan = Plan([SMALL], [sampler("A")], warmup=0, iters=2, rounds=2, check=False)
    Runner(plan, Recorder(store), Timer(), read_clock=read_clock).run()
    store.close()
    assert output == ["read", "timed", "read"] * 2
    rounds = store.records[0].rounds
    assert [part.clocks for part in rounds.values()] == [{"sm_mhz_timed": 1600.0}] * 2


@pytest.mark.parametrize(
    "before, after", [((0, 0), (5, 5)), ((5, 5), (4, 9)), ((5, 5), (9, 5)), ((5, 5), (0, 0))]
)
def test_counters_that_tell_nothing_are_no_clock(before, after):
    assert gpu.sm_clock.mean_mhz(torch.tensor([before]), torch.tensor([after])) is None
