"""Records the status of each cell and reports progress; ranks agree on every failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from fsbench.errors import (
    ProviderUnavailable,
    TimerUnavailable,
    UnsupportedProblem,
    VerificationFailed,
    describe,
    is_out_of_memory,
    one_line,
)
from fsbench.machine.device_state import require_live_device
from fsbench.measure.distributed import Team
from fsbench.measure.gate import GateKey
from fsbench.measure.phase_times import PhaseTimes
from fsbench.measure.process_state import SpoiledProcess
from fsbench.records.cell import Cell
from fsbench.records.store import Store

T = TypeVar("T")


def _ignore(*arguments: object) -> None:
    """Ignore an event: the default of every callback of Recorder."""


@dataclass
class Recorder:
    """Reports progress, and turns an error of a sampler into a status of its cell.

    store: rank 0 writes to it; other ranks have a replica.
    report: called with (cells done, cells in all, activity); a cell at work counts as a part of
        one.
    begin: called with a cell before work on it begins.
    finished: called with a cell that is finished.
    troubled: called with (status, reason) of a failure of this rank.
    verified: called with each new result of the gate.
    gate: failed checks of samplers, "" if they passed.
    times: seconds by phase.
    team: the ranks that measure together, if there are several.
    """

    store: Store
    report: Callable[[float, int, str], None] = _ignore
    begin: Callable[[Cell], None] = _ignore
    finished: Callable[[Cell], None] = _ignore
    troubled: Callable[[str, str], None] = _ignore
    verified: Callable[[GateKey, str], None] = _ignore
    gate: dict[GateKey, str] = field(default_factory=dict)
    team: Team | None = None
    times: PhaseTimes = field(default_factory=PhaseTimes)
    total: int = 0
    parts: int = 1
    _remaining: dict[Cell, int] = field(default_factory=dict)

    def expect(self, total: int, cells: list[Cell], parts: int) -> None:
        """Set up progress: `cells` remain of `total`, each counted as `parts` steps."""
        self.total, self.parts = total, parts
        self._remaining = dict.fromkeys(cells, parts)

    def enter(self, cell: Cell, activity: str, phase: str) -> None:
        """Begin a phase of a cell: report the activity, and record that the cell is at work."""
        self.times.enter(phase)
        self.show(cell, activity)
        self.begin(cell)

    def enter_together(self, cell: Cell, activity: str, phase: str) -> None:
        """Enter a phase; no rank leaves before the cell is recorded.

        A rank that then dies at once would otherwise be taken for a failure of the cell before.
        """
        self.enter(cell, activity, phase)
        if self.team:
            self.team.gather(None)

    def show(self, cell: Cell, activity: str) -> None:
        """Report the activity of a cell."""
        problem = cell.problem
        shape = f"B={problem.B} D={problem.D} V={problem.V}"
        done = self.total - sum(self._remaining.values()) / self.parts
        self.report(done, self.total, f"{shape}: {cell.label}{activity}")

    def finish(self, cell: Cell) -> None:
        """Count a cell as finished."""
        if cell in self._remaining:
            del self._remaining[cell]
            self.times.enter("other")
            self.show(cell, "")
            self.finished(cell)

    def part(self, cell: Cell, activity: str, phase: str, work: Callable[[], T]) -> T | None:
        """Do a part of a cell; return None if it failed, on this rank or another.

        The cell then has a status and is finished.
        """
        self.enter_together(cell, activity, phase)
        result, failure = None, None
        try:
            result = work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # such as SystemExit, raised by the sampler
            failure = error
        if self._failed(cell, failure):
            self.finish(cell)
            return None
        if self._remaining.get(cell):
            self._remaining[cell] -= 1
        return result

    def fail_inputs(self, cells: list[Cell], error: Exception) -> None:
        """Give these cells a status: their inputs could not be made."""
        if self.team:
            raise error  # the other ranks wait; the supervisor ends all of them
        for cell in cells:
            self._failed(cell, error)
            self.finish(cell)

    def extra(self, cell: Cell, name: str, work: Callable[[], T]) -> T | None:
        """Measure one of LACKS; return None if that failed, which the record then says."""
        self.enter(cell, f", {name}", "beside")
        try:
            return work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.store.append_lack(cell, name, describe(error))
            if isinstance(error, SpoiledProcess):
                raise
            require_live_device(cell.problem.device, error)
            return None

    def _failed(self, cell: Cell, error: BaseException | None) -> bool:
        """Return whether this or another rank failed at a cell, which then gets a status."""
        failures = [_status(error) if error else None]
        if failures[0]:
            self.troubled(*failures[0])  # first: the other ranks may be waiting for this one
        if self.team:
            failures = self.team.gather(failures[0])
        for rank, failure in enumerate(failures):
            if failure:
                status, reason = failure
                prefix = f"rank {rank}: " if self.team else ""
                self.store.append_status(cell, status, prefix + reason)
                break
        if isinstance(error, SpoiledProcess):
            raise error
        if error:
            require_live_device(cell.problem.device, error)
        return any(failures)


def _status(error: BaseException) -> tuple[str, str]:
    """Return (status of a cell, reason) for an error."""
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
