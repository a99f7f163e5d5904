"""Where the time of a run goes."""

from __future__ import annotations

from fsbench.measure.phase_times import PhaseTimes


def test_phases_add_up_to_all_of_the_time():
    now = [100.0]
    times = PhaseTimes(lambda: now[0], since=90.0)
    for phase, seconds in (("gate", 8), ("timing", 2), ("gate", 1), ("other", 0.5)):
        times.enter(phase)
        now[0] += seconds
    assert times.phases() == {"start": 10, "gate": 9, "timing": 2, "other": 0.5}
    now[0] += 3
    assert times.phases()["other"] == 3.5
