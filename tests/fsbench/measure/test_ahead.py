"""Compiling ahead: what is compiled when, what the measuring process waits for, what is lost."""

from __future__ import annotations

import re
import signal

import pytest
from runner_doubles import SMALL

from fsbench.measure.ahead import STRAGGLER_S, Ahead, Next, Task, Warmers
from fsbench.measure.outcomes import Outcomes
from fsbench.measure.plan import Plan
from fsbench.measure.runner import Runner
from fsbench.problem import Problem
from fsbench.records.cell import Cell
from fsbench.records.store import Store
from fsbench.timers.fake import FakeTimer

OTHER = Problem(3, 16, 40, "fp32", device="cpu")


@pytest.fixture
def cells(sampler):
    """Cells of samplers on SMALL, then on OTHER: "A", "A'" and so on, as of a plan."""

    def make(names: str) -> dict[str, Cell]:
        plan = Plan([SMALL], [])
        return {
            name + mark: plan.cell(sampler(name), problem, "", "fake", "n/a")
            for mark, problem in (("", SMALL), ("'", OTHER))
            for name in names
        }

    return make


class Line(list):
    """What a hand says; empty: it is gone."""

    def recv(self):
        if not self:
            raise EOFError
        return self.pop(0)


class Double:
    """A hand that writes down what it is told."""

    def __init__(self):
        self.line, self.tasks, self.signals, self.ended = Line(), [], [], False

    def give(self, task: Task) -> None:
        self.tasks.append(task)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def end(self) -> None:
        self.ended = True


class Pool:
    """Warmers with doubles and a clock that is set by hand."""

    def __init__(self, count, check=False, patience=600.0):
        self.now, self.hired = 0.0, []
        self.warmers = Warmers(self.hire, count, check, patience, lambda: self.now)

    def hire(self):
        self.hired.append(Double())
        return self.hired[-1]

    def said(self, number, *words):
        """A hand says (done, seconds); nothing: it is gone."""
        self.hired[number].line.extend([words] if words else [])
        self.warmers.heard(self.hired[number])

    def given(self):
        return [[(task.kind, task.cell) for task in hand.tasks] for hand in self.hired]


def test_tasks_are_given_in_the_order_in_which_cells_are_needed(cells):
    of, pool = cells("AB"), Pool(2)
    pool.warmers.want(of.values())
    assert pool.given() == [[("first", of["A"])], [("first", of["B"])]]
    pool.said(1, True, 5.0)
    assert pool.given()[1][1:] == [("first", of["B'"])]
    pool.said(1, True, 1.0)  # of A only one at a time, and nothing else is left: it waits
    assert len(pool.hired[1].tasks) == 2 and not pool.hired[1].ended
    pool.said(0, True, 9.0)
    assert pool.given()[0][1:] == [("first", of["A'"])] and pool.hired[1].ended
    pool.said(0, True, 1.0)
    assert pool.hired[0].ended and not pool.warmers.hands
    assert pool.warmers.spent() == {"gate": 0, "first": 16}


def test_a_sampler_is_verified_once_and_beside_its_first_call(cells):
    of, pool = cells("A"), Pool(3, check=True)
    pool.warmers.want(of.values())
    assert pool.given()[:2] == [[("gate", of["A"])], [("first", of["A"])]]
    pool.said(0, True, 2.0)
    assert pool.warmers.next([of["A"]]).cell is None
    pool.said(1, True, 3.0)
    assert pool.warmers.next([of["A"]]) == Next(of["A"], 3.0, True)
    pool.said(0, True, 1.0)
    assert [task.kind for hand in pool.hired for task in hand.tasks] == ["gate", "first", "first"]
    assert pool.warmers.next([of["A'"]]) == Next(of["A'"], 1.0, True)


def test_what_is_compiled_comes_first_then_what_nobody_is_at(cells):
    of, pool = cells("ABC"), Pool(2)
    pool.warmers.want(of.values())
    batch = [of["A"], of["B"], of["C"]]
    assert pool.warmers.next(batch) == Next(of["C"])  # and nobody else will do it
    pool.now = 4.0
    assert pool.warmers.next(batch[:2]) == Next(None, working_s=(4.0, 4.0))
    pool.said(1, True, 4.0)
    assert [task.cell for task in pool.hired[1].tasks] == [of["B"], of["B'"]]
    assert pool.warmers.next(batch[:2]) == Next(of["B"], 4.0)
    # A's later problem waits for what compiles its first.
    assert pool.warmers.next([of["A'"]]) == Next(None, working_s=(4.0,))


def test_one_that_fails_dies_or_hangs_leaves_the_work_to_the_measuring_process(cells):
    of, pool = cells("ABC"), Pool(3, check=True, patience=60.0)
    pool.warmers.want(of.values())
    assert pool.given() == [[("gate", of["A"])], [("first", of["A"])], [("gate", of["B"])]]
    pool.said(0, False, 1.0)
    pool.said(1)
    assert pool.hired[1].ended and pool.warmers.next([of["A"]]) == Next(of["A"])
    pool.now = 61.0
    assert pool.warmers.next([of["B"]]) == Next(of["B"])
    assert all(hand.ended for hand in pool.hired) and not pool.warmers.hands
    assert [pool.warmers.next([cell]) for cell in of.values()] == list(map(Next, of.values()))


def test_all_stand_still_and_go_on(cells):
    pool = Pool(2)
    assert not pool.warmers.pause()
    pool.warmers.want(cells("AB").values())
    assert pool.warmers.pause()
    pool.warmers.resume()
    assert [hand.signals for hand in pool.hired] == [[signal.SIGSTOP, signal.SIGCONT]] * 2
    pool.warmers.end()
    assert all(hand.ended for hand in pool.hired)


class Compiling(Ahead):
    """Says that samplers are compiled at these times; each question takes a second."""

    def __init__(self, log, ready):
        self.log, self.ready, self.now = log, ready, 0

    def next(self, cells):
        self.now += 1
        done = [cell for cell in cells if self.ready.get(cell.provider, 0) <= self.now]
        if done:
            return Next(done[0], 0.5)
        return Next(None, working_s=(float(self.now),) * len(cells))

    def pause(self):
        self.log.append(("", "pause", 0))

    def resume(self):
        self.log.append(("", "resume", 0))


@pytest.fixture
def measured(sampler, tmp_path, log, monkeypatch):
    """Measures A, B and C on SMALL and OTHER, that are compiled then: the records."""
    monkeypatch.setattr("fsbench.measure.preparing._LOOK_S", 0)

    def run(hurry=False, **ready):
        three = [sampler(name) for name in "ABC"]
        plan = Plan([SMALL, OTHER], three, warmup=0, iters=2, rounds=2, check=False, hurry=hurry)
        store = Store.create(tmp_path, {})
        try:
            Runner(plan, Outcomes(store, ahead=Compiling(log, ready)), FakeTimer()).run()
        finally:
            store.close()
        return store.records

    return run


def turns(log, b):
    """The samplers stepped at a B, in groups between pauses and resumes."""
    text = "".join(
        {"pause": "(", "resume": ")"}.get(what) or (name if of == b else "")
        for name, what, of in log
        if what != "build"
    )
    return re.sub(r"\(\)", "", text)


@pytest.mark.parametrize("hurry, seconds", [(True, STRAGGLER_S - 2), (False, 40)])
def test_a_straggler_is_waited_for_and_timed_with_the_others(measured, log, hurry, seconds):
    assert len(measured(hurry, B=seconds)) == 6
    assert re.fullmatch(r"ACB\([ABC]{6}\)", turns(log, SMALL.B))
    assert re.fullmatch(r"ABC\([ABC]{6}\)", turns(log, OTHER.B))


def test_in_a_hurry_one_that_takes_long_is_timed_after_the_other_problems(measured, log):
    records = measured(hurry=True, B=40)
    assert {len(record.rounds) for record in records} == {2}
    both = [of for _, what, of in log if what == "step"]
    assert both == [SMALL.B] * 6 + [OTHER.B] * 6 + [SMALL.B] * 3 + [OTHER.B] * 3
    assert [name for name, what, _ in log if what == "step"][-6:] == ["B"] * 6


def test_in_a_hurry_nobody_waits_for_the_slowest_of_several(measured, log):
    measured(hurry=True, B=40, C=90)
    steps = [(name, of) for name, what, of in log if what == "step"]
    order = [(name, of) for name in "ABC" for of in (SMALL.B, OTHER.B)]
    assert list(dict.fromkeys(steps)) == order


def test_nothing_is_timed_while_others_are_at_work(measured, log):
    measured(hurry=True, B=40)
    quiet = False
    for _, what, _ in log:
        quiet = {"pause": True, "resume": False}.get(what, quiet)
        assert what != "build" or not quiet
    assert turns(log, SMALL.B).count("(") == 2


def test_the_first_call_of_the_other_process_is_recorded(measured):
    for record in measured():
        first = record.rounds[0]
        assert first.ahead_s == 0.5 and first.warm[-1] == "ahead"
