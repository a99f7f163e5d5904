"""Starts the measuring processes, watches them, and always ends them.

Samplers run in separate processes: one, or a rank for each GPU that shares a vocabulary. The name
of a cell is on disk before work on it begins. A process that dies, or processes that are silent for
too long, end that cell with the reason; new processes continue with the next one. Torchrun starts
and ends its processes itself: it uses `fsbench.measure.worker` alone.
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
"""Seconds that the other ranks have to agree on a failure, before it is recorded without them."""

SETTLE = 2.0
"""Seconds after an error in which a killed rank is looked for as its cause: the other ranks see a
closed connection, often before the killed rank has ended."""


def measure(
    job: Job, open_store: Callable[[], Store], report: Report, cells: Sequence[Cell] = ()
) -> None:
    """Measure a job in new processes, which have all ended when this returns or raises.

    Args:
        open_store: called when all processes are ready to measure; always returns the same store.
        cells: compiled ahead.

    Raises:
        FsbenchError: the processes failed before the first cell.
    """
    given_up: frozenset[Cell] = frozenset()
    context = server.start()
    began = time.monotonic() - process_age_s()
    compiled = compile_ahead.Compiled()
    if job.warmers and not job.together and cells:
        begin = time.monotonic()
        compiled = compile_ahead.compile_ahead(context, job, cells, report)
        began += time.monotonic() - begin  # reported as "Compiled ahead"
    job = replace(job, first_call_s=compiled.first_call_s, gate=compiled.passed)
    while True:
        part = replace(job, plan=replace(job.plan, given_up=given_up), began=began)
        attempt = _Attempt(context, part, open_store, report, compiled.phases)
        failure = attempt.run()
        if failure is None:
            return
        if attempt.cell is None:
            raise failure.error or FsbenchError(failure.reason)
        if attempt.cell not in attempt.reported:
            open_store().append_status(attempt.cell, failure.status, failure.reason)
        given_up |= {attempt.cell}
        began = time.monotonic()


@dataclass(frozen=True)
class _Failure:
    """Why processes ended early. error: the exception, if fsbench raised it on purpose."""

    status: str
    reason: str
    error: FsbenchError | None = None


@dataclass
class _Attempt:
    """One set of processes, from start to end.

    ahead: seconds of the compile processes by kind of task.
    cell: the cell at work when the processes ended, if there was one.
    reported: cells whose status is recorded.
    """

    context: ForkServerContext
    job: Job
    open_store: Callable[[], Store]
    report: Report
    ahead: dict[str, float]
    cell: Cell | None = None
    reported: set[Cell] = field(default_factory=set)
    _trouble: _Failure | None = None  # of a rank; the others have not agreed yet
    _processes: list[BaseProcess] = field(default_factory=list)
    _ready: list[Connection] = field(default_factory=list)

    def run(self) -> _Failure | None:
        """Run the processes; return None if all succeeded."""
        pipes: list[Connection] = []
        meeting = tempfile.mkdtemp(dir=get_temp_dir()) if self.job.together else ""
        try:
            for rank in range(self.job.ranks):
                parent_end, child_end = self.context.Pipe()
                process = self.context.Process(
                    target=worker.main,
                    args=(self.job, rank, f"file://{meeting}/ranks", child_end),
                    daemon=True,
                )
                process.start()
                child_end.close()
                self._processes.append(process)
                pipes.append(parent_end)
            return self._watch(dict(enumerate(pipes)))
        finally:
            for each in self._processes:
                compile_ahead.end(each)
            for pipe in pipes:
                pipe.close()
            if meeting:
                shutil.rmtree(meeting, ignore_errors=True)

    def _watch(self, pipes: dict[int, Connection]) -> _Failure | None:
        last_message = time.monotonic()
        while pipes:
            patience = GRACE if self._trouble else self.job.seconds
            remaining = last_message + patience - time.monotonic()
            ends = [self._processes[rank].sentinel for rank in pipes]
            ready = wait([*pipes.values(), *ends], timeout=max(remaining, 0))
            if not ready:
                silent = f"timeout: nothing was heard for {self.job.seconds:g} s"
                return self._trouble or _Failure("timeout", silent)
            for rank, pipe in list(pipes.items()):
                if not pipe.poll():
                    if self._processes[rank].sentinel in ready:
                        return self._dead(rank)
                    continue
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    return self._dead(rank)
                if kind == "done":
                    del pipes[rank]
                elif kind == "error":
                    error, reason = value
                    self._trouble = _Failure("error", self._prefix(rank) + reason, error)
                    return self._killed() or self._trouble
                elif kind == "trouble":
                    last_message = time.monotonic()
                    self._trouble = _Failure(value[0], self._prefix(rank) + value[1])
                else:
                    last_message = time.monotonic()
                    self._answer(pipe, kind, value)
        return None

    def _answer(self, pipe: Connection, kind: str, value: tuple) -> None:
        """Answer a message of rank 0, or "ready" of any rank."""
        if kind == "ready":
            self._ready.append(pipe)
            if len(self._ready) == self.job.ranks:
                records = self.open_store().records
                for each in self._ready:
                    each.send(records)
            return
        if kind in ("progress", "finished", "time"):
            self._show(kind, value)
            return
        if kind == "verified":  # the next processes do not verify again
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
                self.reported.add(cell)
                self._trouble = None  # agreed on: not before, as rank 0 may be behind
        pipe.send(None)

    def _show(self, kind: str, value: tuple) -> None:
        if kind == "progress":
            self.report.report(*value)
        elif kind == "finished":
            self.report.finished(self.open_store().record(value[0]))
        else:
            self.open_store().note_time({**value[0], "ahead": self.ahead})

    def _prefix(self, rank: int) -> str:
        return f"rank {rank}: " if self.job.together else ""

    def _dead(self, rank: int) -> _Failure:
        """Return how a process ended unexpectedly, and the trouble that another rank reported."""
        process = self._processes[rank]
        process.join()
        name = f"rank {rank}" if self.job.together else "its process"
        code = process.exitcode or 0
        ending = (
            f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        )
        # Either may be the cause: ranks abort when the connection to another closes.
        trouble = f"; {self._trouble.reason}" if self._trouble else ""
        return _Failure("error", f"{name} {ending}{trouble}")

    def _killed(self) -> _Failure | None:
        """Return the failure of a rank that a signal ended, now or within SETTLE seconds."""
        deadline = time.monotonic() + (SETTLE if self.job.ranks > 1 else 0)
        while True:
            for rank, process in enumerate(self._processes):
                if (process.exitcode or 0) < 0:
                    return self._dead(rank)
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
