"""The measuring loop: times all samplers of a problem in rounds.

For each problem the samplers take turns, in another order every round (Plan.turns), so that drift
of clocks and temperature falls on all of them alike (docs/design/methodology.md). Every round of
every cell is on disk before the next starts; a resumed run measures only the rounds that are
missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsbench.errors import DeviceUnavailable
from fsbench.machine import hardware
from fsbench.machine.device_state import synchronize
from fsbench.measure import energy, host
from fsbench.measure.outcomes import Outcomes
from fsbench.measure.plan import Plan
from fsbench.measure.preparing import Contender, Preparation, work_list
from fsbench.measure.time_left import TimeLeft
from fsbench.problem import Problem
from fsbench.records.cell import Energy, Round
from fsbench.timers import Timer, gpu


@dataclass
class Runner:
    """Carries out a plan on the current CUDA device, or on the CPU.

    gpu_name and nvml_index are of that device ("" and None on a CPU); read_clock: SmClock.read;
    ahead: see Preparation. Of ranks that measure together each has a Runner of its own; the
    problems then have `tp` ranks.

    Raises:
        DeviceUnavailable: energy is asked for, and this device has no counter of it.
    """

    plan: Plan
    outcomes: Outcomes
    timer: Timer
    gpu_name: str = ""
    nvml_index: int | None = None
    read_clock: Callable[[], Tensor] | None = None
    ahead: Mapping[tuple[str, Problem], float] = field(default_factory=dict)
    _idle_w: float | None = None

    def __post_init__(self) -> None:
        if self.plan.energy_s is not None and hardware.energy_mj(self.nvml_index) is None:
            raise DeviceUnavailable(
                "--energy: needs a GPU whose counter of energy NVML can read; see `fsbench doctor`"
            )

    def run(self) -> None:
        """Measure every cell of the plan that the store lacks."""
        plan, outcomes = self.plan, self.outcomes
        batches = work_list(plan, outcomes, self.gpu_name, self.timer.name, self.timer.l2)
        outcomes.expect(
            len(plan.problems) * len(plan.providers),
            [cell for batch in batches for _, cell in batch.samplers],
            plan.rounds + 1 + (plan.energy_s is not None) + (plan.sustained_s is not None),
        )
        preparation = Preparation(plan, outcomes, self.ahead)
        for batch in batches:
            self._measure(*preparation.ready(batch))  # kept by nothing here
            for _, cell in batch.samplers:
                outcomes.finish(cell)
        outcomes.report(outcomes.total, outcomes.total, "done", TimeLeft(0.0))

    def _measure(self, contenders: list[Contender], offset: Tensor) -> None:
        self._time(contenders, offset)
        self._hosts(contenders)
        self._energies(contenders, offset)
        self._sustain(contenders, offset)

    def _time(self, contenders: list[Contender], offset: Tensor) -> None:
        """The interleaved rounds. A contender that fails leaves the list.

        `offset` advances before every step: fresh noise each time.
        """
        store = self.outcomes.store

        for number in range(self.plan.rounds):
            for turn, contender in self._turns(contenders, number):
                cell = contender.cell
                record = store.record(cell)
                if number not in record.rounds:
                    measured = self.outcomes.part(
                        cell,
                        f", round {number + 1} of {self.plan.rounds}",
                        "timing",
                        partial(self._round, contender, contender.step, number, turn, offset),
                    )
                    if measured is None:
                        contenders.remove(contender)
                        continue
                    store.append_round(cell, number, self._slowest(measured))
                for form, step in list(contender.forms.items()):
                    if number in record.forms.get(form, {}):
                        continue
                    measured = self.outcomes.beside(
                        cell, form, partial(self._round, contender, step, number, turn, offset)
                    )
                    if measured is None:
                        del contender.forms[form]
                    else:
                        store.append_form(cell, form, number, measured)

    def _turns(self, contenders: list[Contender], number: int) -> list[tuple[int, Contender]]:
        """(turn, contender) in the order of a round; those measured before keep their turns."""
        here = {contender.cell.provider: contender for contender in contenders}
        problems = {contender.cell.problem for contender in contenders}
        before = [
            record.cell.provider
            for record in self.outcomes.store.records
            if number in record.rounds and record.cell.problem in problems
        ]
        names = self.plan.turns({*here, *before}, number)
        return [(turn, here[name]) for turn, name in enumerate(names) if name in here]

    def _round(
        self,
        contender: Contender,
        step: Callable[[], object],
        number: int,
        turn: int,
        offset: Tensor,
    ) -> Round:
        """One round of a contender's step, or of a form of it, with the state of the GPU around it.

        Raises:
            VerificationFailed: it wrote into what all samplers read.
        """
        expected = int(offset)

        def advance() -> None:
            nonlocal expected
            expected += 1
            offset.add_(1)

        before = hardware.clocks(self.nvml_index)
        counters = [self.read_clock()] if self.read_clock else []
        try:
            measured = self.timer.measure(step, self.plan.iterations(number), advance)
            counters += [self.read_clock()] if self.read_clock else []
            after = hardware.clocks(self.nvml_index)
        finally:
            contender.require_intact(expected)
        clocks = _combined(before, after)
        if counters:
            clocks["sm_mhz_timed"] = gpu.sm_clock.mean_mhz(*counters)
        facts = contender.facts if step is contender.step else {}
        return Round(**asdict(measured), clocks=clocks, turn=turn, **facts)

    def _hosts(self, contenders: list[Contender]) -> None:
        """What an eager call costs the host, of every cell that has none yet."""
        for contender in contenders:
            cell, device = contender.cell, contender.cell.problem.device
            known = self.outcomes.store.record(cell).host is not None
            if known or self.outcomes.team or not host.told_apart(device):
                continue
            work = partial(host.host_time, contender.eager, partial(synchronize, device))
            if found := self.outcomes.beside(cell, "host", work):
                self.outcomes.store.append_beside(cell, "host", found)

    def _energies(self, contenders: list[Contender], offset: Tensor) -> None:
        """The energy of every cell, after all timing of the problem."""
        store = self.outcomes.store
        for contender in contenders:
            if self.plan.energy_s is None or store.record(contender.cell).energy is not None:
                continue
            work = partial(self._energy, contender, offset, self.plan.energy_s)
            if found := self.outcomes.beside(contender.cell, "energy", work):
                store.append_beside(contender.cell, "energy", found)

    def _energy(self, contender: Contender, offset: Tensor, seconds: float) -> Energy:
        counter = partial(hardware.energy_mj, self.nvml_index)
        if self._idle_w is None:
            synchronize(contender.cell.problem.device)
            self._idle_w = energy.idle_watts(counter)
        queue = partial(_queue, contender.step, offset)
        return energy.energy(queue, counter, seconds, self._idle_w)

    def _sustain(self, contenders: list[Contender], offset: Tensor) -> None:
        """The back-to-back steps of every cell, after all else of the problem."""
        store, seconds = self.outcomes.store, self.plan.sustained_s
        counter = partial(hardware.energy_mj, self.nvml_index)
        for contender in contenders:
            cell = contender.cell
            if seconds is None or store.record(cell).sustained is not None:
                continue
            queue = partial(_queue_alone, contender.step, offset, cell.problem.device)
            work = partial(energy.sustained, queue, counter, seconds)
            if found := self.outcomes.beside(cell, "sustained", work):
                store.append_beside(cell, "sustained", found)

    def _slowest(self, measured: Round) -> Round:
        """Of each step the time of the rank that took longest; the rest is this rank's."""
        if self.outcomes.team is None:
            return measured
        spans = self.outcomes.team.gather(measured.span_us)
        return replace(measured, span_us=[max(times) for times in zip(*spans, strict=True)])


def _queue(step: Callable[[], object], offset: Tensor, steps: int) -> energy.Queued:
    """Give the GPU some steps; the event that follows them."""
    for _ in range(steps):
        offset.add_(1)
        step()
    done = torch.cuda.Event()
    done.record()
    return done


def _queue_alone(
    step: Callable[[], object], offset: Tensor, device: str, steps: int
) -> energy.Queued:
    """As _queue, with nothing between the steps: all have one offset. On a CPU they are done."""
    offset.add_(1)
    for _ in range(steps):
        step()
    if device == "cpu":
        return _Moment(time.perf_counter())
    done = torch.cuda.Event(enable_timing=True)
    done.record()
    return done


@dataclass(frozen=True)
class _Moment:
    """When a CPU was done, s: what an event is on a GPU."""

    at_s: float

    def synchronize(self) -> None:
        """It is done."""

    def elapsed_time(self, later: _Moment) -> float:
        """Milliseconds between both."""
        return (later.at_s - self.at_s) * 1e3


def _combined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Clocks after the round (the GPU is warm then), throttle reasons of either end."""
    throttle = {*before.get("throttle", []), *after.get("throttle", [])}
    return {**after, "throttle": sorted(throttle)} if after else {}
