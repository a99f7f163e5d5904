"""Joules per step, from a counter that advances in jumps; with a double of GPU, clock and NVML."""

from __future__ import annotations

import pytest

from fsbench.errors import DeviceUnavailable
from fsbench.measure.loops import LEAD_S, idle_watts, run_loop


class Machine:
    """A GPU that takes `step_s` for a step, and a counter that is brought up to date in jumps.

    Power rises from `idle_w` to `busy_w` over the first 0.1 s of work, as on a real one.
    """

    def __init__(self, step_s=0.003, update_s=0.07, idle_w=100.0, busy_w=500.0, read_s=0.0) -> None:
        self.step_s, self.update_s, self.read_s = step_s, update_s, read_s
        self.idle_w, self.busy_w = idle_w, busy_w
        self.now = 0.0
        self.free_at = 0.0  # when the GPU will have done what it was given
        self.began = None
        self.gaps = 0

    def queue(self, steps: int) -> Work:
        if self.began is None:
            self.began = self.now
        self.gaps += self.now > self.free_at
        self.free_at = max(self.now, self.free_at) + steps * self.step_s
        return Work(self, self.free_at)

    def joules(self, at_s: float) -> float:
        if self.began is None or at_s <= self.began:
            return self.idle_w * at_s
        rise, work = 0.1, at_s - self.began
        ramp = (self.busy_w - self.idle_w) * (work - min(work, rise) / 2)
        return self.idle_w * at_s + ramp

    def counter_mj(self) -> int:
        self.now += self.read_s
        return int(1e3 * self.joules(self.now // self.update_s * self.update_s))

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Work:
    def __init__(self, machine: Machine, done_at: float) -> None:
        self.machine, self.done_at = machine, done_at

    def synchronize(self) -> None:
        self.machine.now = max(self.machine.now, self.done_at)

    def elapsed_time(self, later: Work) -> float:
        return (later.done_at - self.done_at) * 1e3


@pytest.mark.parametrize("step_s", [0.0003, 0.003, 0.04])
def test_energy_of_a_step_is_power_times_time(step_s):
    machine = Machine(step_s)
    result = run_loop(machine.queue, machine.counter_mj, 1.0, 77.0, machine.clock)
    per_step = machine.busy_w * step_s
    assert result.joules / result.steps == pytest.approx(per_step, rel=max(0.02, 1.5 * step_s))
    assert result.steps * step_s == pytest.approx(result.seconds)
    assert 0.8 < result.seconds <= 1.15
    assert result.idle_w == 77.0


@pytest.mark.parametrize("read_s", [0.012, 0.05])
def test_the_gpu_has_work_while_a_slow_counter_is_read(read_s):
    machine = Machine(0.0003, read_s=read_s)
    result = run_loop(machine.queue, machine.counter_mj, 1.0, clock=machine.clock)
    assert result.seconds / result.steps * 1e6 == pytest.approx(300)


@pytest.mark.parametrize("step_s", [0.0003, 0.04, 2.0])
def test_sustained_steps_have_the_time_between_events_and_an_energy(step_s):
    machine = Machine(step_s, update_s=0.07)
    result = run_loop(machine.queue, machine.counter_mj, 1.0, clock=machine.clock)
    assert result.seconds / result.steps * 1e6 == pytest.approx(step_s * 1e6)
    assert machine.gaps == 0
    if step_s == 2.0:  # two chunks, and one advance that is seen
        assert (result.steps, result.joules) == (1, None)
    else:
        assert result.joules / result.steps == pytest.approx(
            500 * step_s, rel=max(0.02, 1.5 * step_s)
        )


def test_sustained_steps_without_a_counter_have_a_time():
    machine = Machine()
    result = run_loop(machine.queue, lambda: None, 0.5, clock=machine.clock)
    assert (result.seconds / result.steps, result.joules) == (pytest.approx(0.003), None)


def test_the_queue_runs_dry_only_before_the_loop():
    machine = Machine()
    run_loop(machine.queue, machine.counter_mj, 0.5, 0.0, machine.clock)
    assert machine.gaps == 0  # in this double, being asked exactly when free is no gap
    assert machine.now < LEAD_S + 0.5 + 0.1


def test_idle_power():
    machine = Machine(idle_w=123.0)
    watts = idle_watts(machine.counter_mj, 1.0, machine.clock, machine.sleep)
    assert watts == pytest.approx(123.0, rel=0.02)


@pytest.mark.parametrize(
    ("counter", "reason"), [(lambda: None, "no counter"), (lambda: 5, "it did so 0 times")]
)
def test_an_absent_or_frozen_counter_is_an_error(counter, reason):
    machine = Machine()
    with pytest.raises(DeviceUnavailable, match=reason):
        run_loop(machine.queue, counter, 0.5, 0.0, machine.clock)
    with pytest.raises(DeviceUnavailable, match=reason):
        idle_watts(counter, 0.5, machine.clock, machine.sleep)
