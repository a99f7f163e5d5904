"""Where the time of a run goes, and how well the rest is foretold."""

from __future__ import annotations

from itertools import groupby

import pytest
from cells import cell

from fsbench.measure.ledger import Ledger

# Recorded on two cores with nothing compiled before: D = 1024, V = 50,000, 90 steps in 3 rounds.
# Sampler, B; seconds of inputs, gate, first call, check, capture, timing.
RECORDED = """\
race 1 0.949 15.272 1.43 0.216 0.455 3.573
greedy 1 0 0.013 0.116 0.151 0.458 2.91
online 1 0 0.986 0.017 0.22 0.472 3.478
matmul 1 0 0.0 0.118 0.0 0.525 2.939
compiled 1 0 2.1 1.535 0.216 0.458 3.389
race 2 0.435 0.0 1.828 0.234 0.476 2.887
greedy 2 0 0.0 0.125 0.158 0.463 2.822
online 2 0 0.0 0.021 0.233 0.477 3.087
matmul 2 0 0.0 0.116 0.0 0.463 2.703
compiled 2 0 0.0 1.307 0.238 0.575 2.903
race 3 0.475 0.0 1.696 0.245 0.5 3.086
greedy 3 0 0.0 0.13 0.177 0.492 2.86
online 3 0 0.0 0.024 0.254 0.507 3.346
matmul 3 0 0.0 0.124 0.0 0.488 2.817
compiled 3 0 0.0 1.374 0.25 0.494 3.178
race 4 0.46 0.0 1.685 0.351 0.535 4.357
greedy 4 0 0.0 0.155 0.219 0.536 4.174
online 4 0 0.0 0.043 0.353 0.558 4.741
matmul 4 0 0.0 0.138 0.0 0.527 4.013
compiled 4 0 0.0 1.399 0.356 0.566 4.596
race 6 0.471 0.0 1.807 0.379 0.562 4.754
greedy 6 0 0.0 0.159 0.223 0.548 4.429
online 6 0 0.0 0.044 0.398 0.576 5.115
matmul 6 0 0.0 0.141 0.0 0.544 4.303
compiled 6 0 0.0 1.482 0.421 0.574 4.957
race 8 0.451 0.0 1.707 0.493 0.624 6.376
greedy 8 0 0.0 0.169 0.266 0.575 5.932
online 8 0 0.0 0.06 0.452 0.59 6.394
matmul 8 0 0.0 0.16 0.0 0.614 5.739
compiled 8 0 0.0 1.517 0.503 0.633 6.793
"""
PHASES = ("inputs", "gate", "first call", "check", "capture", "timing")


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def replay(clock, lines):
    """Replays cells as a run meets them; yields (seconds so far, seconds left) of each finished."""
    ledger = Ledger(clock)
    rows = [line.split() for line in lines.splitlines()]
    cells = {(row[0], row[1]): cell(provider=row[0], b=int(row[1])) for row in rows}
    waiting = set(cells.values())

    def pass_time(at, phase, seconds):
        ledger.enter(phase, at)
        clock.now += seconds

    for _, group in groupby(rows, lambda row: row[1]):
        batch = [(cells[name, b], list(map(float, spent))) for name, b, *spent in group]
        for at, spent in batch:
            for phase, seconds in zip(PHASES[:-1], spent, strict=False):
                pass_time(at, phase, seconds)
        for _ in range(3):
            for at, spent in batch:
                pass_time(at, "timing", spent[-1] / 3)
        for at, _ in batch:
            waiting.discard(at)
            ledger.finish(waiting)
        yield clock.now, ledger
    assert not waiting


def test_what_is_left_is_foretold_within_30_percent(clock):
    told = [(now, ledger.left_s) for now, ledger in replay(clock, RECORDED)]
    assert len(told) == 6 and told[-1][1] == 0
    for now, left in told[:-1]:
        assert 0.7 < left / (clock.now - now) < 1.3


def test_a_long_first_call_and_the_gate_are_not_expected_again(clock):
    lines = "a 1 0 20 80 0 0 3\nb 1 0 0 0.5 0 0 3\na 2 0 0 0 0 0 3\nb 2 0 0 0 0 0 3"
    now, ledger = next(replay(clock, lines))
    assert now == pytest.approx(206.5) and ledger.left_s == pytest.approx(4 + 3.5)
    clock.now += 5
    assert ledger.left_s == pytest.approx(2.5)
    clock.now += 50
    assert ledger.left_s == 0


def test_samplers_that_are_yet_to_come_are_taken_for_the_usual(clock):
    ledger, first, other = Ledger(clock), cell(provider="a"), cell(provider="b")
    assert ledger.left_s is None
    for phase, seconds in (("gate", 8), ("timing", 2)):
        ledger.enter(phase, first)
        clock.now += seconds
    ledger.finish({other})
    assert ledger.left_s == 10


def test_phases_add_up_to_all_of_the_time(clock):
    clock.now = 103.0
    ledger = Ledger(clock, since=90.0)
    clock.now = 105.0
    ledger.enter("gate", cell())
    clock.now = 106.0
    ledger.enter("timing", cell(b=3))
    clock.now = 110.0
    ledger.enter("gate", cell(b=3))
    clock.now = 111.0
    assert ledger.phases() == {"start": 15, "gate": 2, "timing": 4}
    assert ledger.spent(cell(b=3)) == 5
