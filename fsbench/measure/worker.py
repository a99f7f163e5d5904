"""A measuring process: gets a Job, measures it, and sends messages to the supervisor."""

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
from fsbench.measure.phase_times import PhaseTimes
from fsbench.measure.plan import Job
from fsbench.measure.recorder import Recorder
from fsbench.measure.runner import Runner
from fsbench.measure.server import end_with_server
from fsbench.records.cell import CellRecord
from fsbench.records.store import Store
from fsbench.timers import gpu, make_timer


class Report(Protocol):
    """Shows the progress of a run."""

    def report(self, done: float, total: int, activity: str) -> None:
        """Show progress, see `Recorder.report`."""

    def finished(self, record: CellRecord) -> None:
        """Show a finished cell."""


def ready_runner(job: Job, rank: int, meet: str, recorder: Recorder) -> Runner:
    """Return the runner of one rank of a job in this process; ranks meet here.

    Args:
        recorder: gets the team of ranks. Its store must have the records before the runner runs.
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
    samplers = discover(map(Path, job.provider_paths))
    plan = replace(job.plan, providers=select(samplers, job.names))
    read_clock = None
    if job.device == "cuda":
        with suppress(Exception):  # without a compiler the clock is unknown, as without NVML
            read_clock = gpu.sm_clock.SmClock().read
    return Runner(plan, recorder, timer, gpu_name, nvml_index, read_clock, job.first_call_s)


def carry_out(runner: Runner) -> None:
    """Run the runner; ranks end together."""
    runner.run()
    if team := runner.recorder.team:
        team.gather(None)
        team.leave()


def main(job: Job, rank: int, meet: str, pipe: Connection) -> None:
    """Run a measuring process, which ends with the process that started it.

    Messages are (kind, value). After "ready" the answer is the records; after "cell" and "line" it
    is None, once they are on disk.
    """
    end_with_server()

    def send(kind: str, *value: object) -> None:
        pipe.send((kind, value))

    def ask(kind: str, *value: object) -> Any:
        send(kind, *value)
        return pipe.recv()

    is_first = rank == 0
    try:
        recorder = Recorder(
            Store.replica(write=lambda *written: ask("line", *written) if is_first else None),
            report=lambda *progress: send("progress", *progress) if is_first else None,
            begin=lambda cell: ask("cell", cell) if is_first else None,
            troubled=lambda *trouble: send("trouble", *trouble),
            finished=lambda cell: send("finished", cell) if is_first else None,
            verified=lambda *verdict: send("verified", *verdict) if is_first else None,
            gate=dict(job.gate),
            times=PhaseTimes(since=job.began),
        )
        gc.freeze()  # imported modules are not searched for garbage at every cell
        if job.device == "cuda":
            compilers.watch()
        runner = ready_runner(job, rank, meet, recorder)
        recorder.store.replace_records(ask("ready"))
        carry_out(runner)
        if is_first:
            send("time", {"phases": recorder.times.phases(), "compiling": compilers.seconds()})
        send("done")
    except BaseException as error:
        with suppress(OSError):
            send("error", error if isinstance(error, FsbenchError) else None, describe(error))
        os._exit(1)
    pipe.close()
    os._exit(0)  # skips destructors: a process group's may wait for ranks that have ended
