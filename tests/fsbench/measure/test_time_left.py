"""Where the time of a run goes, and how well the rest is foretold."""

from __future__ import annotations

from itertools import groupby

import pytest
from cells import cell

from fsbench.measure.time_left import PhaseTimes, TimeLeft

# Recorded on two cores with nothing compiled before: B = 1, D = 1024, V = 50,000 at six
# temperatures, so with six gates; 60 steps in 3 rounds. Sampler, number of the problem; seconds of
# inputs, gate, first call, check, capture, timing.
RECORDED = """\
race 1 0.945 16.966 1.693 0.233 0.493 3.337
greedy 1 0 0.016 0.125 0.178 0.489 2.886
online 1 0 1.066 0.02 0.23 0.501 3.359
matmul 1 0 0.0 0.124 0.0 0.479 2.788
compiled 1 0 2.273 1.414 0.238 0.492 2.904
race 2 0.942 4.241 1.618 0.234 0.501 2.364
greedy 2 0 0.014 0.13 0.166 0.488 2.391
online 2 0 1.057 0.022 0.234 0.495 2.531
matmul 2 0 0.0 0.129 0.0 0.501 2.23
compiled 2 0 2.359 1.346 0.246 0.51 2.343
race 3 0.482 2.14 1.719 0.243 0.524 2.379
greedy 3 0 0.016 0.143 0.174 0.712 2.306
online 3 0 1.106 0.023 0.249 0.51 2.547
matmul 3 0 0.0 0.14 0.0 0.498 2.296
compiled 3 0 2.399 1.4 0.224 0.494 2.38
race 4 0.484 2.187 1.626 0.244 0.517 2.751
greedy 4 0 0.014 0.133 0.172 0.492 2.611
online 4 0 1.106 0.024 0.251 0.505 2.667
matmul 4 0 0.0 0.126 0.0 0.488 2.461
compiled 4 0 2.366 1.485 0.248 0.517 2.766
race 5 0.48 2.111 1.898 0.244 0.518 2.616
greedy 5 0 0.014 0.128 0.178 0.484 2.739
online 5 0 1.056 0.02 0.24 0.521 2.554
matmul 5 0 0.0 0.132 0.0 0.504 2.454
compiled 5 0 2.778 1.539 0.251 0.689 2.753
race 6 0.499 2.148 1.94 0.272 0.519 2.478
greedy 6 0 0.014 0.133 0.172 0.495 2.476
online 6 0 1.303 0.024 0.255 0.5 2.718
matmul 6 0 0.0 0.127 0.0 0.511 2.371
compiled 6 0 2.77 1.933 0.241 0.494 2.539
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
    times = PhaseTimes(clock)
    rows = [line.split() for line in lines.splitlines()]
    cells = {(row[0], row[1]): cell(provider=row[0], b=int(row[1])) for row in rows}
    waiting = set(cells.values())

    def pass_time(cell_, phase, seconds):
        times.enter(phase, cell_)
        clock.now += seconds

    for _, group in groupby(rows, lambda row: row[1]):
        batch = [(cells[name, b], list(map(float, spent))) for name, b, *spent in group]
        for cell_, spent in batch:
            for phase, seconds in zip(PHASES[:-1], spent, strict=False):
                pass_time(cell_, phase, seconds)
        for _ in range(3):
            for cell_, spent in batch:
                pass_time(cell_, "timing", spent[-1] / 3)
        for cell_, _ in batch:
            waiting.discard(cell_)
            times.finish(waiting)
        yield clock.now, times
    assert not waiting


def test_the_time_left_is_estimated_within_30_percent(clock):
    reported = [(now, times.remaining.seconds) for now, times in replay(clock, RECORDED)]
    assert len(reported) == 6 and reported[-1][1] == 0
    for now, remaining in reported[:-1]:
        assert 0.7 < remaining / (clock.now - now) < 1.3


def test_a_long_first_call_and_the_gate_are_not_expected_again(clock):
    lines = "a 1 0 20 80 0 0 3\nb 1 0 0 0.5 0 0 3\na 2 0 0 0 0 0 3\nb 2 0 0 0 0 0 3"
    now, times = next(replay(clock, lines))
    assert now == pytest.approx(206.5) and times.remaining == (pytest.approx(4 + 3.5), False)
    clock.now += 5
    assert times.remaining.seconds == pytest.approx(2.5)
    clock.now += 50
    assert times.remaining.seconds == 0


def test_samplers_that_have_not_run_are_expected_to_take_the_mean(clock):
    times, first, other = PhaseTimes(clock), cell(provider="a"), cell(provider="b")
    assert times.remaining is None
    for phase, seconds in (("gate", 8), ("timing", 2)):
        times.enter(phase, first)
        clock.now += seconds
    times.finish({other})
    assert times.remaining == TimeLeft(10, is_guess=True)


def test_before_a_cell_is_finished_the_gates_are_extrapolated(clock):
    """Three samplers with gates of 8 s and other phases of 2 s, at two problems each."""
    cells = [cell(provider=name, b=b) for b in (1, 2) for name in "abc"]
    times = PhaseTimes(clock)
    times.expect(dict.fromkeys(cells))
    clock.now += 60  # imports
    times.enter("gate", cells[0])
    clock.now += 8
    assert times.remaining is None
    times.enter("timing", cells[0])
    clock.now += 2
    times.enter("gate", cells[1])
    clock.now += 3
    assert times.remaining == TimeLeft(2 * 8 - 3 + 5 * 2, is_guess=True)
    times.finish({*cells[1:]})
    assert times.remaining == TimeLeft(8 + 4 * 2, is_guess=True)  # of b, the gate was seen


def test_phases_add_up_to_all_of_the_time(clock):
    clock.now = 103.0
    times = PhaseTimes(clock, since=90.0)
    clock.now = 105.0
    times.enter("gate", cell())
    clock.now = 106.0
    times.enter("timing", cell(b=3))
    clock.now = 110.0
    times.enter("gate", cell(b=3))
    clock.now = 111.0
    assert times.phases() == {"start": 15, "gate": 2, "timing": 4}
    assert times.total(cell(b=3)) == 5
