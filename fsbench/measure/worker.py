"""The work of a measuring process, which is told what to do and tells what it found."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from fsbench.discover import discover, select
from fsbench.errors import FsbenchError, describe
from fsbench.machine import compilers, device_state
from fsbench.measure.distributed import Team
from fsbench.measure.plan import Job
from fsbench.measure.recorder import Recorder
from fsbench.measure.runner import Runner
from fsbench.measure.server import end_with_server
from fsbench.measure.time_left import PhaseTimes, TimeLeft
from fsbench.records.cell import CellRecord
from fsbench.records.store import Store
from fsbench.timers import gpu, make_timer


class Report(Protocol):
    """Shows what a run does."""

    def report(self, done: float, total: int, activity: str, left: TimeLeft | None = None) -> None:
        """See `Recorder.report`."""

    def finished(self, record: CellRecord, seconds: float) -> None:
        """Nothing is left to do for a cell, which took so long."""


def ready_runner(job: Job, rank: int, meet: str, recorder: Recorder) -> Runner:
    """What measures the job as one of its ranks, in this process, once recorder has its records.

    meet: where ranks meet, see Team.join.
    """
    gpu_name, nvml_index = "", None
    if job.device == "cuda":
        torch.cuda.set_device(job.indices[rank])
        gpu_name = torch.cuda.get_device_name()
        nvml_index = device_state.nvml_index(job.indices[rank])
    if job.together:
        recorder.team = Team.join(job.device, rank, job.ranks, meet, 2 * job.seconds)
    align = recorder.team.align if recorder.team else None
    timer = make_timer(job.timer, job.device, job.l2, align)
    found = discover(map(Path, job.provider_paths), job.reasons)
    plan = replace(job.plan, providers=select(found, job.names))
    read_clock = None
    if job.device == "cuda":
        with suppress(Exception):  # no compiler here: the clock stays unknown, as without NVML
            read_clock = gpu.sm_clock.SmClock().read
    return Runner(plan, recorder, timer, gpu_name, nvml_index, read_clock, job.ahead)


def carry_out(runner: Runner) -> None:
    """Measure; ranks end together."""
    runner.run()
    if team := runner.recorder.team:
        team.gather(None)
        team.leave()


def main(job: Job, rank: int, meet: str, line: Connection) -> None:
    """The whole of a process. It tells what it does by `line`, and ends with who started it.

    Messages are (kind, value). Of "ready", "cell" and "line" the answer is waited for: records;
    nothing, once it is on disk.
    """
    end_with_server()

    def tell(kind: str, *value: object) -> None:
        line.send((kind, value))

    def ask(kind: str, *value: object) -> Any:
        tell(kind, *value)
        return line.recv()

    first = rank == 0
    try:
        recorder = Recorder(
            Store.replica(write=lambda *written: ask("line", *written) if first else None),
            report=lambda *progress: tell("progress", *progress) if first else None,
            begin=lambda cell: ask("cell", cell) if first else None,
            troubled=lambda *trouble: tell("trouble", *trouble),
            finished=lambda *cell: tell("finished", *cell) if first else None,
            verified=lambda *verdict: tell("verified", *verdict) if first else None,
            gate=dict(job.gate),
            times=PhaseTimes(since=job.began),
        )
        gc.freeze()  # what is imported stays, and need not be searched for garbage at every cell
        if job.device == "cuda":
            compilers.watch()
        runner = ready_runner(job, rank, meet, recorder)
        recorder.store.know(ask("ready"))
        carry_out(runner)
        if first:
            tell("time", {"phases": recorder.times.phases(), "compiling": compilers.seconds()})
        tell("done")
    except BaseException as error:
        with suppress(OSError):
            tell("error", error if isinstance(error, FsbenchError) else None, describe(error))
        os._exit(1)
    line.close()
    os._exit(0)  # not through destructors: a process group's may wait for ranks that are gone
