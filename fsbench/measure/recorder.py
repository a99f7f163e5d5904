"""What came of each cell: told to the results, to the progress bar and to the other ranks."""

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
from fsbench.measure.process_state import SpoiledProcess
from fsbench.measure.time_left import PhaseTimes, TimeLeft
from fsbench.records.cell import Cell
from fsbench.records.store import Store
from fsbench.verify.check import Setting

T = TypeVar("T")
GateKey = tuple[str, Setting]  # name of a sampler, and what it is verified for


@dataclass
class Recorder:
    """Tells what is going on; turns what a sampler raises into a row of results.

    report: called with (cells done, cells in all, what is going on, what is left or None); a cell
        at work counts as a part of one. begin: with a cell before it is worked on. finished: with
        one that nothing is left to do for, and the seconds that it took. troubled: with (status,
        reason) of a failure of this rank.
    gate: what a sampler failed in verification, "" if in nothing. verified: called with each of
        these that is new.
    times: seconds by cell and phase.
    team: of the ranks that measure together. All take the same decisions: they agree on every
        failure. Rank 0's store is written to, the others' are replicas.
    """

    store: Store
    report: Callable[[float, int, str, TimeLeft | None], None] = lambda done, total, what, left: (
        None
    )
    begin: Callable[[Cell], None] = lambda cell: None
    finished: Callable[[Cell, float], None] = lambda cell, seconds: None
    troubled: Callable[[str, str], None] = lambda status, reason: None
    verified: Callable[[GateKey, str], None] = lambda key, failed: None
    gate: dict[GateKey, str] = field(default_factory=dict)
    team: Team | None = None
    times: PhaseTimes = field(default_factory=PhaseTimes)
    total: int = 0
    parts: int = 1
    _done: float = 0.0
    _left: dict[Cell, int] = field(default_factory=dict)

    def expect(self, total: int, cells: list[Cell], parts: int) -> None:
        """Of `total` cells these are left to measure, in so many parts each."""
        self.total, self.parts = total, parts
        self._done = total - len(cells)
        self._left = dict.fromkeys(cells, parts)

    def at(self, cell: Cell, what: str, phase: str) -> None:
        """Report what is going on, at a cell which is about to be worked on in a phase."""
        self.times.enter(phase, cell)
        self.tell(cell, what)
        self.begin(cell)

    def tell(self, cell: Cell, what: str) -> None:
        """Report what is going on."""
        problem = cell.problem
        where = f"B={problem.B} D={problem.D} V={problem.V}"
        self.report(
            min(self._done, self.total),
            self.total,
            f"{where}: {cell.label}{what}",
            self.times.left,
        )

    def finish(self, cell: Cell) -> None:
        """Nothing is left to do for a cell."""
        if cell in self._left:
            self._done += self._left.pop(cell) / self.parts
            self.times.finish(self._left)
            self.tell(cell, "")
            self.finished(cell, self.times.total(cell))

    def part(self, cell: Cell, what: str, phase: str, work: Callable[[], T]) -> T | None:
        """Do a part of a cell. Returns None if it failed, here or on another rank.

        The cell then has a status, and is finished.
        """
        self.at(cell, what, phase)
        result, failure = None, None
        try:
            result = work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # such as SystemExit: it is the sampler's
            failure = error
        if self._failed(cell, failure):
            self.finish(cell)
            return None
        if self._left.get(cell):
            self._left[cell] -= 1
            self._done += 1 / self.parts
        return result

    def without_inputs(self, cells: list[Cell], error: Exception) -> None:
        """The inputs of these cells could not be made: each has a status."""
        if self.team:
            raise error  # the others are waiting; whoever started this rank ends them too
        for cell in cells:
            self._failed(cell, error)
            self.finish(cell)

    def extra(self, cell: Cell, what: str, work: Callable[[], T]) -> T | None:
        """Measure more of a cell than its time; return None if that failed: the cell lacks it."""
        self.at(cell, f", {what}", "beside")
        try:
            return work()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            self.store.append_lack(cell, what, describe(error))
            if isinstance(error, SpoiledProcess):
                raise
            require_live_device(cell.problem.device, error)
            return None

    def _failed(self, cell: Cell, error: BaseException | None) -> bool:
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
        if isinstance(error, SpoiledProcess):
            raise error
        if error:
            require_live_device(cell.problem.device, error)
        return any(failures)


def _status(error: BaseException) -> tuple[str, str]:
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
