"""The measuring loop: times all samplers of a problem in rounds.

For each problem the samplers take turns, in another order every round (Plan.turns), so drift of
clocks and temperature affects all of them equally (docs/design/methodology.md). Every round of
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
from fsbench.measure import loops
from fsbench.measure.plan import Plan
from fsbench.measure.preparation import Contender, Preparation, work_list
from fsbench.measure.recorder import Recorder
from fsbench.problem import Problem
from fsbench.records.cell import Host, Loop, Round
from fsbench.timers import Timer, gpu


@dataclass
class Runner:
    """Measures a plan on the current CUDA device, or on the CPU. Each rank has one.

    gpu_name, nvml_index: the device's name and NVML index; "" and None on a CPU.
    read_clock: SmClock.read.
    first_call_s: see Preparation.

    Raises:
        DeviceUnavailable: energy is asked for, and this device has no counter of it.
    """

    plan: Plan
    recorder: Recorder
    timer: Timer
    gpu_name: str = ""
    nvml_index: int | None = None
    read_clock: Callable[[], Tensor] | None = None
    first_call_s: Mapping[tuple[str, Problem], float] = field(default_factory=dict)
    _idle_w: float | None = None

    def __post_init__(self) -> None:
        if self.plan.energy_s is not None and hardware.energy_mj(self.nvml_index) is None:
            raise DeviceUnavailable(
                "--energy: needs a GPU whose counter of energy NVML can read; see `fsbench doctor`"
            )

    def run(self) -> None:
        """Measure every cell of the plan that the store lacks."""
        plan, recorder = self.plan, self.recorder
        batches = work_list(plan, recorder, self.gpu_name, self.timer.name, self.timer.l2)
        recorder.expect(
            len(plan.problems) * len(plan.providers),
            [cell for batch in batches for _, cell in batch.samplers],
            plan.rounds + 1 + (plan.energy_s is not None) + (plan.sustained_s is not None),
        )
        preparation = Preparation(plan, recorder, self.first_call_s)
        for batch in batches:
            self._measure(*preparation.ready(batch))  # no reference is kept: memory is freed
            for _, cell in batch.samplers:
                recorder.finish(cell)
        recorder.report(recorder.total, recorder.total, "done")

    def _measure(self, contenders: list[Contender], offset: Tensor) -> None:
        self._time(contenders, offset)
        self._measure_extras(contenders, offset)

    def _time(self, contenders: list[Contender], offset: Tensor) -> None:
        """The interleaved rounds. A contender that fails leaves the list.

        `offset` advances before every step: fresh noise each time.
        """
        store = self.recorder.store

        for number in range(self.plan.rounds):
            for turn, contender in self._turns(contenders, number):
                cell = contender.cell
                record = store.record(cell)
                if number not in record.rounds:
                    measured = self.recorder.part(
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
                    measured = self.recorder.extra(
                        cell, form, partial(self._round, contender, step, number, turn, offset)
                    )
                    if measured is None:
                        del contender.forms[form]
                    else:
                        store.append_form(cell, form, number, measured)

    def _turns(self, contenders: list[Contender], number: int) -> list[tuple[int, Contender]]:
        """Return (turn, contender) in the order of a round; measured ones keep their turns."""
        by_name = {contender.cell.provider: contender for contender in contenders}
        problems = {contender.cell.problem for contender in contenders}
        before = [
            record.cell.provider
            for record in self.recorder.store.records
            if number in record.rounds and record.cell.problem in problems
        ]
        names = self.plan.turns({*by_name, *before}, number)
        return [(turn, by_name[name]) for turn, name in enumerate(names) if name in by_name]

    def _round(
        self,
        contender: Contender,
        step: Callable[[], object],
        number: int,
        turn: int,
        offset: Tensor,
    ) -> Round:
        """Time one round of a contender's step or form; record the state of the GPU around it.

        Raises:
            VerificationFailed: the sampler wrote into inputs that all samplers share.
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

    def _measure_extras(self, contenders: list[Contender], offset: Tensor) -> None:
        """Measure what is asked for in addition to time, after all timing of the problem."""
        plan, store = self.plan, self.recorder.store
        works: dict[str, Callable[[Contender], Loop | Host]] = {}
        if not self.recorder.team and all(
            is_asynchronous(c.cell.problem.device) for c in contenders
        ):
            works["host"] = lambda c: loops.host_time(
                c.eager, partial(synchronize, c.cell.problem.device)
            )
        if plan.energy_s is not None:
            works["energy"] = partial(self._energy, offset, plan.energy_s)
        if plan.sustained_s is not None:
            works["sustained"] = partial(self._sustained, offset, plan.sustained_s)
        for name, work in works.items():
            for contender in contenders:
                cell = contender.cell
                if getattr(store.record(cell), name) is not None:
                    continue
                if measured := self.recorder.extra(cell, name, partial(work, contender)):
                    store.append_extra(cell, name, measured)

    def _energy(self, offset: Tensor, seconds: float, contender: Contender) -> Loop:
        """Repeat a step, each with fresh noise, and count joules; idle power is measured once."""
        counter = partial(hardware.energy_mj, self.nvml_index)
        device = contender.cell.problem.device
        if self._idle_w is None:
            synchronize(device)
            self._idle_w = loops.idle_watts(counter)
        queue = partial(queue_steps, contender.step, offset, device, True)
        return loops.run_loop(queue, counter, seconds, self._idle_w)

    def _sustained(self, offset: Tensor, seconds: float, contender: Contender) -> Loop:
        """Repeat a step with nothing between the steps of a chunk."""
        queue = partial(queue_steps, contender.step, offset, contender.cell.problem.device, False)
        return loops.run_loop(queue, partial(hardware.energy_mj, self.nvml_index), seconds)

    def _slowest(self, measured: Round) -> Round:
        """Return the round with each step's time taken from the slowest rank."""
        if self.recorder.team is None:
            return measured
        spans = self.recorder.team.gather(measured.span_us)
        return replace(measured, span_us=[max(times) for times in zip(*spans, strict=True)])


def is_asynchronous(device: str) -> bool:
    """Return whether a call returns before its work is done; on a CPU it does not."""
    return device != "cpu"


def queue_steps(
    step: Callable[[], object], offset: Tensor, device: str, is_fresh: bool, steps: int
) -> loops.Queued:
    """Give the device some steps; return an event that follows them.

    is_fresh: advance the offset before every step, not only before the first.
    """
    for number in range(steps):
        if is_fresh or number == 0:
            offset.add_(1)
        step()
    if device == "cpu":
        return _Moment(time.perf_counter())
    done = torch.cuda.Event(enable_timing=True)
    done.record()
    return done


@dataclass(frozen=True)
class _Moment:
    """Time at which a CPU was done, s, in place of an event of a GPU."""

    at_s: float

    def synchronize(self) -> None:
        """Return: the work of a CPU is already done."""

    def elapsed_time(self, later: _Moment) -> float:
        """Return the milliseconds between both."""
        return (later.at_s - self.at_s) * 1e3


def _combined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return clocks after the round, when the GPU is warm, and throttle reasons of both ends."""
    throttle = {*before.get("throttle", []), *after.get("throttle", [])}
    return {**after, "throttle": sorted(throttle)} if after else {}
