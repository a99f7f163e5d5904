"""The work of a measuring process, which is told what to do and tells what it found."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from fsbench.discover import discover, select
from fsbench.errors import FsbenchError, describe
from fsbench.machine import device_state
from fsbench.measure.distributed import Team
from fsbench.measure.outcomes import Outcomes, Setting
from fsbench.measure.plan import Plan
from fsbench.measure.runner import Runner
from fsbench.records.store import Store
from fsbench.timers import make_timer


@dataclass(frozen=True)
class Job:
    """What every process of a run is told; plain data, since it crosses processes.

    plan: without its providers, which are found again by `names` (and `provider_paths`).
    indices: of the GPUs, one per rank. timer: its own name. seconds: that all may be silent.
    together: the processes are ranks that share the vocabulary, if only one. gate: see Outcomes.
    """

    plan: Plan
    names: list[str]
    provider_paths: list[str]
    device: str
    indices: list[int]
    timer: str
    l2: str
    seconds: float
    together: bool = False
    gate: dict[Setting, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """How many."""
        return len(self.indices)


Report = Callable[[float, int, str], None]


def ready_runner(job: Job, rank: int, meet: str, outcomes: Outcomes) -> Runner:
    """What measures the job as one of its ranks, in this process, once outcomes has its records.

    meet: where ranks meet, see Team.join.
    """
    gpu_name, nvml_index = "", None
    if job.device == "cuda":
        torch.cuda.set_device(job.indices[rank])
        gpu_name = torch.cuda.get_device_name()
        nvml_index = device_state.nvml_index(job.indices[rank])
    if job.together:
        outcomes.team = Team.join(job.device, rank, job.ranks, meet, 2 * job.seconds)
    align = outcomes.team.align if outcomes.team else None
    timer = make_timer(job.timer, job.device, job.l2, align)
    plan = replace(job.plan, providers=select(discover(map(Path, job.provider_paths)), job.names))
    return Runner(plan, outcomes, timer, gpu_name, nvml_index)


def carry_out(runner: Runner) -> None:
    """Measure; ranks end together."""
    runner.run()
    if team := runner.outcomes.team:
        team.gather(None)
        team.leave()


def main(job: Job, rank: int, meet: str, line: Connection) -> None:
    """The whole of a process. It tells what it does by `line`, and ends with who started it.

    Messages are (kind, value). Of "ready", "cell" and "line" the answer is waited for: records;
    nothing, once it is on disk.
    """
    # A group of its own: what a compiler starts ends with it, and Ctrl-C reaches the parent alone.
    os.setsid()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def tell(kind: str, *value: object) -> None:
        line.send((kind, value))

    def ask(kind: str, *value: object) -> Any:
        tell(kind, *value)
        return line.recv()

    first = rank == 0
    try:
        outcomes = Outcomes(
            Store.replica(write=lambda *written: ask("line", *written) if first else None),
            report=lambda *progress: tell("progress", *progress) if first else None,
            begin=lambda cell: ask("cell", cell) if first else None,
            troubled=lambda *trouble: tell("trouble", *trouble),
            verified=lambda *verdict: tell("verified", *verdict) if first else None,
            gate=dict(job.gate),
        )
        runner = ready_runner(job, rank, meet, outcomes)
        outcomes.store.know(ask("ready"))
        carry_out(runner)
        tell("done")
    except BaseException as error:
        with suppress(OSError):
            tell("error", error if isinstance(error, FsbenchError) else None, describe(error))
        os._exit(1)
    line.close()
    os._exit(0)  # not through destructors: a process group's may wait for ranks that are gone


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.1)
    os.killpg(0, signal.SIGKILL)
