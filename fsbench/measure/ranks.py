"""Starts the ranks of a run over several GPUs, one process each, and ends them, come what may.

A rank that dies, or ranks that are silent for too long, end the cell that was being measured, with
the reason; the others are killed, and new ranks go on with the next cell. Under torchrun, which
does the same for processes of its own, `measure_as_rank` alone is used.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from fsbench.discover import discover, select
from fsbench.errors import FsbenchError, describe
from fsbench.machine import device_state
from fsbench.measure.distributed import Team
from fsbench.measure.outcomes import Outcomes
from fsbench.measure.plan import Plan
from fsbench.measure.runner import Runner
from fsbench.records.cell import Cell
from fsbench.records.store import Store
from fsbench.timers import make_timer


@dataclass(frozen=True)
class Job:
    """What every rank is told; plain data, since it crosses processes.

    plan: without its providers, which are found again by `names` (and `provider_paths`).
    indices: of the GPUs, one per rank. timer: its own name. seconds: that ranks may be silent.
    folder: of the results, which exists.
    """

    plan: Plan
    names: list[str]
    provider_paths: list[str]
    device: str
    indices: list[int]
    timer: str
    l2: str
    seconds: float
    folder: Path = Path()

    @property
    def ranks(self) -> int:
        """How many."""
        return len(self.indices)


Report = Callable[[float, int, str], None]

GRACE = 15.0
"""Seconds that the other ranks have to agree on a failure, before it is taken as it is."""

SETTLE = 2.0
"""Seconds after an error in which a rank that was killed shows as its cause: what the others see
is a connection that closed, often before the rank itself is gone."""


def measure_as_rank(
    job: Job,
    rank: int,
    meet: str,
    report: Report = lambda done, total, what: None,
    begin: Callable[[Cell], None] = lambda cell: None,
    troubled: Callable[[str, str], None] = lambda status, reason: None,
) -> None:
    """Carry out the job as one of its ranks, in this process; rank 0 writes the results.

    report, begin, troubled: see Outcomes.
    """
    gpu_name, nvml_index = "", None
    if job.device == "cuda":
        torch.cuda.set_device(job.indices[rank])
        gpu_name = torch.cuda.get_device_name()
        nvml_index = device_state.nvml_index(job.indices[rank])
    team = Team.join(job.device, rank, job.ranks, meet, 2 * job.seconds)
    timer = make_timer(job.timer, job.device, job.l2, team.align)
    plan = replace(job.plan, providers=select(discover(map(Path, job.provider_paths)), job.names))
    replica = Store.replica(job.folder)
    team.gather(None)  # all have read the folder before the first line is written
    store = Store.reopen(job.folder) if rank == 0 else replica
    try:
        outcomes = Outcomes(store, report, begin, troubled, team)
        Runner(plan, outcomes, timer, gpu_name, nvml_index).run()
        team.gather(None)
    finally:
        store.close()
    team.leave()


def measure(job: Job, report: Report) -> None:
    """Carry out the job in processes of its own; none is left when this returns or raises.

    The folder must exist, with no store open on it.

    Raises:
        FsbenchError: ranks failed before they came to a cell.
    """
    given_up: set[Cell] = set()
    while True:
        attempt = replace(job, plan=replace(job.plan, given_up=frozenset(given_up)))
        failure = _Attempt(attempt, report).run()
        if failure is None:
            return
        status, reason, cell = failure
        if cell is None:
            raise FsbenchError(f"{job.ranks} ranks: {reason}")
        store = Store.reopen(job.folder)
        store.append_status(cell, status, reason)
        store.close()
        given_up.add(cell)


class _Attempt:
    """One set of processes, from their start to the end of all of them."""

    def __init__(self, job: Job, report: Report):
        self._job = job
        self._report = report
        self._cell: Cell | None = None
        self._trouble: tuple[str, str] | None = None  # a rank's, not yet agreed on

    def run(self) -> tuple[str, str, Cell | None] | None:
        """None if all ranks did their work, else (status, reason, cell that was being measured)."""
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as meeting:
            processes, lines = [], []
            try:
                for rank in range(self._job.ranks):
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(
                        target=_rank_main,
                        args=(self._job, rank, f"file://{meeting}/ranks", theirs),
                        daemon=True,
                    )
                    process.start()
                    theirs.close()
                    processes.append(process)
                    lines.append(ours)
                return self._watch(processes, lines)
            finally:
                for process in processes:
                    assert process.pid
                    with suppress(OSError):  # there is no such group, or no more
                        os.killpg(process.pid, signal.SIGKILL)
                    process.kill()
                for process in processes:
                    process.join()

    def _watch(
        self, processes: list[Any], lines: list[Connection]
    ) -> tuple[str, str, Cell | None] | None:
        open_lines = dict(enumerate(lines))
        heard = time.monotonic()
        while open_lines:
            patience = GRACE if self._trouble else self._job.seconds
            left = heard + patience - time.monotonic()
            ready = wait(list(open_lines.values()), timeout=max(left, 0))
            if not ready:
                if self._trouble:
                    return *self._trouble, self._cell
                reason = f"timeout: no rank said anything for {self._job.seconds:g} s"
                return "timeout", reason, self._cell
            for rank, line in list(open_lines.items()):
                if line not in ready:
                    continue
                try:
                    kind, value = line.recv()
                except EOFError:
                    del open_lines[rank]
                    processes[rank].join()
                    if processes[rank].exitcode != 0:
                        return "error", _how(rank, processes[rank]), self._cell
                    continue
                if kind == "error":
                    killed = _killed(processes)
                    return "error", killed or f"rank {rank}: {value}", self._cell
                heard = time.monotonic()
                if kind == "trouble":
                    self._trouble = (value[0], f"rank {rank}: {value[1]}")
                    continue
                # From rank 0, whose silence is everybody's.
                self._trouble = None
                if kind == "cell":
                    self._cell = value
                else:
                    self._report(*value)
        return None


def _killed(processes: list[Any]) -> str:
    """What ended a rank by a signal, if one was or is within SETTLE seconds, else ""."""
    deadline = time.monotonic() + SETTLE
    while True:
        for rank, process in enumerate(processes):
            if (process.exitcode or 0) < 0:
                return _how(rank, process)
        if time.monotonic() > deadline:
            return ""
        time.sleep(0.02)


def _how(rank: int, process: Any) -> str:
    """How a rank ended, in words."""
    if process.exitcode < 0:
        return f"rank {rank} was ended by {signal.Signals(-process.exitcode).name}"
    return f"rank {rank} exited with code {process.exitcode}"


def _rank_main(job: Job, rank: int, meet: str, line: Connection) -> None:
    """A process that is one rank. It reports by `line`, and does not outlive who started it."""
    # A group of its own: what a compiler starts ends with it, and Ctrl-C reaches the parent alone.
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def say(kind: str, value: object) -> None:
        if rank == 0 or kind in ("trouble", "error"):
            line.send((kind, value))

    try:
        measure_as_rank(
            job,
            rank,
            meet,
            report=lambda *progress: say("progress", progress),
            begin=lambda cell: say("cell", cell),
            troubled=lambda *trouble: say("trouble", trouble),
        )
    except BaseException as error:
        with suppress(OSError):
            say("error", describe(error) if isinstance(error, Exception) else repr(error))
        os._exit(1)
    line.close()
    os._exit(0)  # not through destructors: a process group's may wait for ranks that are gone


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)
