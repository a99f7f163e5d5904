"""The measuring loop: verify, build, warm up, then time all samplers of a problem in rounds.

For each problem the samplers take turns (A B C, A B C, ...), so that drift of clocks and
temperature falls on all of them alike (docs/methodology.md). Every round of every cell is on disk
before the next starts; a resumed run measures only the rounds that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fsbench.discover import Found
from fsbench.errors import (
    DeviceUnavailable,
    ProviderUnavailable,
    TimerUnavailable,
    UnsupportedProblem,
    VerificationFailed,
    describe,
    is_out_of_memory,
    one_line,
)
from fsbench.machine import hardware
from fsbench.machine.device_state import free_memory, require_live_device, synchronize
from fsbench.measure import energy
from fsbench.measure.distributed import Team
from fsbench.measure.plan import Plan
from fsbench.measure.preparing import Contender, Inputs, Preparation
from fsbench.problem import Problem
from fsbench.provider import Provider
from fsbench.records.store import Cell, Round, Store
from fsbench.timers import Timer


@dataclass
class Runner:
    """Carries out a plan on the current CUDA device, or on the CPU.

    gpu_name and nvml_index are of that device ("" and None on a CPU). `report` is called with
    (cells done, cells in all, what is going on); a cell at work counts as a part of one. `begin` is
    called with each cell that is worked on, `troubled` with (status, reason) of a failure.

    team: of the ranks that carry out the plan together, each with a Runner of its own; its problems
    then have `tp` ranks. All runners take the same decisions: they agree on every failure. Rank 0's
    store is written to, the others' are replicas.
    """

    plan: Plan
    store: Store
    timer: Timer
    gpu_name: str = ""
    nvml_index: int | None = None
    report: Callable[[float, int, str], None] = lambda done, total, what: None
    begin: Callable[[Cell], None] = lambda cell: None
    troubled: Callable[[str, str], None] = lambda status, reason: None
    team: Team | None = None
    _idle_w: float | None = None

    def __post_init__(self) -> None:
        self._preparation = Preparation(self.plan, self.team)

    def run(self) -> None:
        """Measure every cell of the plan that the store lacks.

        Raises:
            DeviceUnavailable: energy is asked for, and this device has no counter of it.
        """
        if self.plan.energy_s is not None and hardware.energy_mj(self.nvml_index) is None:
            raise DeviceUnavailable(
                "--energy: needs a GPU whose counter of energy NVML can read; see `fsbench doctor`"
            )
        each = len(self.plan.providers)
        total = each * len(self.plan.problems)
        for number, problem in enumerate(self.plan.problems):
            done: float = number * each
            for share, what in self._measure(problem):
                done += share
                self.report(done, total, what)
        self.report(total, total, "done")

    def cell(self, entry: Found, problem: Problem) -> Cell:
        """The cell of one sampler on one problem, as this run measures it."""
        provider = entry.provider
        graph = bool(
            self.plan.graph
            and problem.device == "cuda"
            and provider
            and provider.capabilities.graph_safe
        )
        return Cell(
            provider=entry.name,
            label=provider.label if provider else entry.name,
            kind=str(provider.kind_on(problem)) if provider else "",
            fused=bool(provider and provider.capabilities.fused),
            gpu=self.gpu_name,
            timer=self.timer.name,
            graph=graph,
            l2=self.timer.l2,
            **problem.fields(),
        )

    def _measure(self, problem: Problem) -> Iterator[tuple[float, str]]:
        """All samplers on one problem. Yields (cells done since the last time, what comes next)."""
        pending = list(self._pending(problem))
        if not pending:
            return
        where = f"B={problem.B} D={problem.D} V={problem.V}"
        yield len(self.plan.providers) - len(pending), f"{where}: inputs"
        try:
            inputs = self._preparation.inputs_of(problem)
        except Exception as error:
            if self.team:
                raise  # the others are waiting; whoever started this rank ends them too
            for _, cell in pending:
                self._failed(cell, error)
            return
        # Of each cell, building counts as much as one round, and so does its energy.
        share = 1 / (self.plan.rounds + 1 + (self.plan.energy_s is not None))
        finished = 0.0
        contenders = []
        for provider, cell in pending:
            yield finished, f"{where}: {cell.label}"
            contender = self._prepare(provider, cell, inputs)
            if contender:
                contenders.append(contender)
            finished = share if contender else 1.0
        for cell, number in self._time(contenders, inputs.offset):
            yield finished, f"{where}: {cell.label}, round {number + 1} of {self.plan.rounds}"
            finished = share
        for cell in self._energies(contenders, inputs.offset):
            yield finished, f"{where}: {cell.label}, energy"
            finished = share

    def _pending(self, problem: Problem) -> Iterator[tuple[Provider, Cell]]:
        """Samplers with rounds to measure; records the reason for those that cannot be."""
        for entry in self.plan.providers:
            cell = self.cell(entry, problem)
            if (entry.name, problem) in self.plan.given_up:
                continue
            if entry.provider and self._complete(entry.provider, problem, cell):
                continue
            refusal = entry.refusal(problem)
            if refusal:
                self.store.append_status(cell, *refusal)
            elif entry.provider:
                yield entry.provider, cell

    def _complete(self, provider: Provider, problem: Problem, cell: Cell) -> bool:
        """Whether the store has all that the plan asks of a cell."""
        record = self.store.record(cell)
        numbers = set(range(self.plan.rounds))
        forms = self._preparation.form_builds(provider, problem)
        return (
            record.rounds.keys() >= numbers
            and all(record.forms.get(form, {}).keys() >= numbers for form in forms)
            and (self.plan.energy_s is None or record.energy is not None)
        )

    def _prepare(self, provider: Provider, cell: Cell, inputs: Inputs) -> Contender | None:
        """A contender, or None with the reason in the store."""
        self.begin(cell)
        contender, failure = None, None
        try:
            contender = self._preparation.contender(provider, cell, inputs)
        except Exception as error:
            failure = error
        if self._failed(cell, failure):
            contender = None
            free_memory(cell.device)
        for form, why in contender.lacks.items() if contender else ():
            self.store.append_lack(cell, form, why)
        return contender

    def _time(self, contenders: list[Contender], offset: Tensor) -> Iterator[tuple[Cell, int]]:
        """The interleaved rounds; yields each cell and round just before it is measured.

        `offset` advances before every step: fresh noise each time. A contender that fails leaves
        the list.
        """

        def advance() -> None:
            offset.add_(1)

        for number in range(self.plan.rounds):
            for contender in list(contenders):
                cell = contender.cell
                record = self.store.record(cell)
                forms = [
                    form for form in contender.forms if number not in record.forms.get(form, {})
                ]
                if number in record.rounds and not forms:
                    continue
                yield cell, number
                if number not in record.rounds:
                    self.begin(cell)
                    timed, failure = None, None
                    try:
                        timed = self._round(contender.step, number, advance, contender.facts)
                    except Exception as error:
                        failure = error
                    if self._failed(cell, failure) or timed is None:
                        contenders.remove(contender)
                        continue
                    self.store.append_round(cell, number, self._slowest(timed))
                for form in forms:
                    try:
                        measured = self._round(contender.forms[form], number, advance, {})
                    except Exception as error:
                        self._record_lack(cell, form, error)
                        del contender.forms[form]
                        continue
                    self.store.append_form(cell, form, number, measured)

    def _round(
        self,
        step: Callable[[], object],
        number: int,
        advance: Callable[[], None],
        facts: dict[str, Any],
    ) -> Round:
        """One round of a step, with the state of the GPU around it."""
        before = hardware.clocks(self.nvml_index)
        measured = self.timer.measure(step, self.plan.iterations(number), advance)
        clocks = _combined(before, hardware.clocks(self.nvml_index))
        return Round(**asdict(measured), clocks=clocks, **facts)

    def _energies(self, contenders: list[Contender], offset: Tensor) -> Iterator[Cell]:
        """The energy of every cell, after all timing of the problem; yields it just before."""
        if self.plan.energy_s is None:
            return
        counter = partial(hardware.energy_mj, self.nvml_index)
        for contender in contenders:
            if self.store.record(contender.cell).energy is not None:
                continue
            yield contender.cell
            try:
                if self._idle_w is None:
                    synchronize(contender.cell.device)
                    self._idle_w = energy.idle_watts(counter)
                queue = partial(_queue, contender.step, offset)
                found = energy.energy(queue, counter, self.plan.energy_s, self._idle_w)
            except Exception as error:
                self._record_lack(contender.cell, "energy", error)
                continue
            self.store.append_energy(contender.cell, found)

    def _record_lack(self, cell: Cell, what: str, error: Exception) -> None:
        """Note what could not be measured of a cell beside its time; as `_failed`."""
        self.store.append_lack(cell, what, describe(error))
        require_live_device(cell.device, error)

    def _failed(self, cell: Cell, error: Exception | None) -> bool:
        """Whether this or another rank failed at a cell, which then gets a status."""
        failures = [_status(error) if error else None]
        if failures[0]:
            self.troubled(*failures[0])  # before the others are asked: they may be waiting for us
        if self.team:
            failures = self.team.gather(failures[0])
        for rank, failure in enumerate(failures):
            if failure:
                status, reason = failure
                where = f"rank {rank}: " if self.team else ""
                self.store.append_status(cell, status, where + reason)
                break
        if error:
            require_live_device(cell.device, error)
        return any(failures)

    def _slowest(self, measured: Round) -> Round:
        """Of each step the time of the rank that took longest; the rest is this rank's."""
        if self.team is None:
            return measured
        spans = self.team.gather(measured.span_us)
        return replace(measured, span_us=[max(times) for times in zip(*spans, strict=True)])


def _status(error: Exception) -> tuple[str, str]:
    """(status of a cell, reason) of what went wrong."""
    for expected, status in _STATUS_OF.items():
        if isinstance(error, expected):
            return status, one_line(error)
    return "oom" if is_out_of_memory(error) else "error", describe(error)


_STATUS_OF: dict[type[Exception], str] = {
    VerificationFailed: "check_failed",
    UnsupportedProblem: "unsupported",
    ProviderUnavailable: "unavailable",
    TimerUnavailable: "timer_unavailable",
}


def _queue(step: Callable[[], object], offset: Tensor, steps: int) -> energy.Queued:
    """Give the GPU some steps; the event that follows them."""
    for _ in range(steps):
        offset.add_(1)
        step()
    done = torch.cuda.Event()
    done.record()
    return done


def _combined(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Clocks after the round (the GPU is warm then), throttle reasons of either end."""
    throttle = {*before.get("throttle", []), *after.get("throttle", [])}
    return {**after, "throttle": sorted(throttle)} if after else {}
