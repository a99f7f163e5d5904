"""Starts the processes that measure, and ends them, come what may.

Samplers run in processes of their own: one, or a rank for each GPU that shares a vocabulary. The
cell that is worked on is on disk before it begins. A process that dies, or processes that are
silent for too long, end that cell, with the reason; new processes go on with the next one. Under
torchrun, which does the same for processes of its own, `fsbench.measure.worker` alone is used.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from multiprocessing.util import get_temp_dir

from fsbench.errors import FsbenchError
from fsbench.machine.compilers import process_age_s
from fsbench.measure import compile_ahead, server, worker
from fsbench.measure.plan import Job
from fsbench.measure.worker import Report
from fsbench.records.cell import Cell
from fsbench.records.store import Store

GRACE = 15.0
"""Seconds that the other ranks have to agree on a failure, before it is taken as it is."""

SETTLE = 2.0
"""Seconds after an error in which a rank that was killed shows as its cause: what the others see
is a connection that closed, often before the rank itself is gone."""


def measure(
    job: Job, open_store: Callable[[], Store], report: Report, cells: Sequence[Cell] = ()
) -> None:
    """Carry out the job in processes of its own; none is left when this returns or raises.

    open_store: called each time that all processes are ready to measure; gives the same store.
    cells: what is compiled ahead.

    Raises:
        FsbenchError: the processes failed before they came to a cell.
    """
    given_up: frozenset[Cell] = frozenset()
    context = server.start()
    began = time.monotonic() - process_age_s()
    compiled = compile_ahead.Compiled()
    if job.warmers and not job.together and cells:
        begin = time.monotonic()
        compiled = compile_ahead.compile_ahead(context, job, cells, report)
        began += time.monotonic() - begin  # counted by itself
    job = replace(job, ahead=compiled.seconds, gate=compiled.passed)
    while True:
        part = replace(job, plan=replace(job.plan, given_up=given_up), began=began)
        attempt = _Attempt(context, part, open_store, report, compiled.spent)
        failure = attempt.run()
        if failure is None:
            return
        if attempt.cell is None:
            raise failure.error or FsbenchError(failure.reason)
        if attempt.cell not in attempt.told:
            open_store().append_status(attempt.cell, failure.status, failure.reason)
        given_up |= {attempt.cell}
        began = time.monotonic()


@dataclass(frozen=True)
class _Failure:
    """Why processes did not do their work; error: if fsbench raised it on purpose."""

    status: str
    reason: str
    error: FsbenchError | None = None


@dataclass
class _Attempt:
    """One set of processes, from their start to the end of all of them.

    ahead: seconds of what was compiled ahead. cell: what they were at when they ended, if they came
    so far. told: cells that have a reason.
    """

    context: ForkServerContext
    job: Job
    open_store: Callable[[], Store]
    report: Report
    ahead: dict[str, float]
    cell: Cell | None = None
    told: set[Cell] = field(default_factory=set)
    _trouble: _Failure | None = None  # a rank's, not yet agreed on
    _processes: list[BaseProcess] = field(default_factory=list)
    _ready: list[Connection] = field(default_factory=list)

    def run(self) -> _Failure | None:
        """None if all processes did their work."""
        lines: list[Connection] = []
        # Below the server's folder, which is removed even if this process is killed.
        meeting = tempfile.mkdtemp(dir=get_temp_dir()) if self.job.together else ""
        try:
            for rank in range(self.job.ranks):
                ours, theirs = self.context.Pipe()
                process = self.context.Process(
                    target=worker.main,
                    args=(self.job, rank, f"file://{meeting}/ranks", theirs),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                lines.append(ours)
            return self._watch(dict(enumerate(lines)))
        finally:
            for each in self._processes:
                compile_ahead.end(each)
            for line in lines:
                line.close()
            if meeting:
                shutil.rmtree(meeting, ignore_errors=True)

    def _watch(self, lines: dict[int, Connection]) -> _Failure | None:
        heard = time.monotonic()
        while lines:
            patience = GRACE if self._trouble else self.job.seconds
            left = heard + patience - time.monotonic()
            ends = [self._processes[rank].sentinel for rank in lines]
            ready = wait([*lines.values(), *ends], timeout=max(left, 0))
            if not ready:
                silent = f"timeout: nothing was heard for {self.job.seconds:g} s"
                return self._trouble or _Failure("timeout", silent)
            for rank, line in list(lines.items()):
                if not line.poll():
                    if self._processes[rank].sentinel in ready:
                        return self._dead(rank)
                    continue
                try:
                    kind, value = line.recv()
                except (EOFError, OSError):
                    return self._dead(rank)
                if kind == "done":
                    del lines[rank]
                elif kind == "error":
                    error, reason = value
                    self._trouble = _Failure("error", self._of(rank) + reason, error)
                    return self._killed() or self._trouble
                elif kind == "trouble":
                    heard = time.monotonic()
                    self._trouble = _Failure(value[0], self._of(rank) + value[1])
                else:
                    heard = time.monotonic()
                    self._answer(line, kind, value)
        return None

    def _answer(self, line: Connection, kind: str, value: tuple) -> None:
        """To a message from rank 0, whose silence is everybody's; or to "ready" from any."""
        if kind == "ready":
            self._ready.append(line)
            if len(self._ready) == self.job.ranks:
                records = self.open_store().records
                for each in self._ready:
                    each.send(records)
            return
        if kind in ("progress", "finished", "time"):
            self._show(kind, value)
            return
        if kind == "verified":  # not to be done again by the processes that follow these
            setting, failed = value
            self.job.gate[setting] = failed
            return
        if kind == "cell":
            (self.cell,) = value
            self.open_store().begin(self.cell)
        else:
            cell, written = value
            self.open_store().append(cell, written)
            if "status" in written:
                self.told.add(cell)
                self._trouble = None  # agreed on: not before, as rank 0 may be behind
        line.send(None)

    def _show(self, kind: str, value: tuple) -> None:
        if kind == "progress":
            self.report.report(*value)
        elif kind == "finished":
            cell, seconds = value
            self.report.finished(self.open_store().record(cell), seconds)
        else:
            self.open_store().note_time({**value[0], "ahead": self.ahead})

    def _of(self, rank: int) -> str:
        return f"rank {rank}: " if self.job.together else ""

    def _dead(self, rank: int) -> _Failure:
        """How a process ended that had not said that it would; and what another had said."""
        process = self._processes[rank]
        process.join()
        who = f"rank {rank}" if self.job.together else "its process"
        code = process.exitcode or 0
        how = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        )
        # Which of both is the cause depends: ranks abort when the line to another closes.
        said = f"; {self._trouble.reason}" if self._trouble else ""
        return _Failure("error", f"{who} {how}{said}")

    def _killed(self) -> _Failure | None:
        """What ended a rank by a signal, if one was or is within SETTLE seconds."""
        deadline = time.monotonic() + (SETTLE if self.job.ranks > 1 else 0)
        while True:
            for rank, process in enumerate(self._processes):
                if (process.exitcode or 0) < 0:
                    return self._dead(rank)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
