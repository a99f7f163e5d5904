"""Compile what the jobs of record.toml time, in parallel, before tools/record.py times it.

    python tools/compile_jobs.py --only 'paper,lean'
    python tools/record.py --only 'paper,lean' --compiled

Otherwise each `fsbench run` compiles what it times while its GPU waits. This program verifies every
sampler and calls it once for each LM head, batch size and set of filters, in as many processes as
the machine has cores; the processes only fill the caches on disk. It leaves out jobs that time
several ranks, whose shards have other sizes, jobs with separate caches, and samplers that autotune.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import typer
from record_jobs import ROOT, chosen, fill, read_jobs
from record_jobs import Job as Recorded

from fsbench.cli import app
from fsbench.cli.run import job_of
from fsbench.cli.run_options import (
    Distribution,
    Machine,
    Output,
    RunOptions,
    Samplers,
    Shapes,
)
from fsbench.cores import usable_cores
from fsbench.machine import hardware
from fsbench.measure import compile_ahead, server
from fsbench.measure.gate import setting_of
from fsbench.measure.plan import Job
from fsbench.provider import Kind
from fsbench.records.cell import Cell
from fsbench.records.iomodel import gpu_slug

GROUPS = (Samplers, Shapes, Distribution, Machine, RunOptions, Output)
CELLS = 24
"""Most cells of a task: a process takes seconds to start, and batch sizes share kernels."""

Task = tuple[Job, list[Cell]]


def measured(job: Recorded, device: str = "cuda") -> Job | None:
    """Return what a job's `fsbench run` measures; None if this file does not compile it."""
    if not job.resume_command.endswith("fsbench run") or job.gpus > 1:
        return None
    arguments = shlex.split(fill(job.command.partition("fsbench run ")[2], out="out"))
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    values = command.make_context("run", arguments).params
    options: list[Any] = [
        group(**{each.name: values[each.name] for each in fields(group)}) for group in GROUPS
    ]
    return job_of(device, *options)[0]


def tasks(jobs: Iterable[Job]) -> list[Task]:
    """Return jobs, each with a few of its cells, so that nothing is verified or called twice.

    What is verified comes first, because it takes longest.
    """
    gates: list[Task] = []
    settings, problems = set(), set()
    groups: dict[tuple[object, ...], Task] = {}
    for job in jobs:
        # Providers cannot be pickled; a process discovers them by name.
        both = replace(job, plan=replace(job.plan, problems=[], providers=[]))
        first_only = replace(both, plan=replace(both.plan, check=False))
        entries = {each.name: each for each in job.plan.providers}
        for cell in job.plan.cells("", job.timer, job.l2):
            problem = replace(cell.problem, logits="normal:1")  # the call is made with zeros
            setting = (cell.provider, setting_of(problem))
            is_verified = job.plan.check and cell.kind != str(Kind.LOWER_BOUND)
            entry = entries[cell.provider]
            tunes = entry.provider and entry.provider.tunes
            if tunes or entry.refusal(cell.problem, can_run=False):
                continue
            if is_verified and setting not in settings:
                settings.add(setting)
                gates.append((both, [cell]))
            elif (cell.provider, problem) not in problems:
                head = (problem.D, problem.V, problem.dtype, problem.weights)
                key = (*job.provider_paths, head)
                groups.setdefault(key, (first_only, []))[1].append(cell)
            problems.add((cell.provider, problem))
    parts = []
    for job, cells in groups.values():
        cells.sort(key=lambda cell: cell.provider)
        starts = range(0, len(cells), CELLS)
        parts += [(job, cells[start : start + CELLS]) for start in starts]
    return gates + parts


class Tried(NamedTuple):
    """Cells that failed, each with its error, and the seconds of all processes by sampler."""

    failed: list[str]
    seconds: Counter[str]


def compile_tasks(waiting: Sequence[Task], gpus: Sequence[int], processes: int) -> Tried:
    """Do each task in a new process."""
    context = server.start()
    remaining = deque(enumerate(waiting))
    running: dict[Connection, BaseProcess] = {}
    tried = Tried([], Counter())
    try:
        while remaining or running:
            while remaining and len(running) < processes:
                number, (job, cells) = remaining.popleft()
                receiver, sender = context.Pipe(duplex=False)
                placed = replace(job, indices=[gpus[number % len(gpus)]])
                process: BaseProcess = context.Process(
                    target=compile_ahead.main, args=(placed, cells, sender), daemon=True
                )
                process.start()
                sender.close()
                running[receiver] = process
            for receiver in cast(list[Connection], wait(list(running))):
                try:
                    task, name, problem, error, seconds = receiver.recv()
                except (EOFError, OSError):
                    compile_ahead.end(running.pop(receiver))
                    receiver.close()
                    continue
                tried.seconds[name] += seconds
                if error:
                    tried.failed.append(f"{task} of {name}: {problem}: {error}")
    finally:
        for process in running.values():
            compile_ahead.end(process)
    return tried


def main(arguments: list[str] | None = None) -> None:
    """Parse the options and compile."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="*", help="names of jobs, comma list; * matches anything")
    parser.add_argument("--jobs", type=Path, default=Path(__file__).with_name("record.toml"))
    parser.add_argument("--processes", type=int, default=max(1, usable_cores() - 2))
    args = parser.parse_args(arguments)
    gpus = hardware.gpus()
    if not gpus:
        raise SystemExit(f"compile_jobs: expected an NVIDIA GPU; {hardware.nvml_problem()}")
    os.chdir(ROOT)
    jobs = chosen(read_jobs(args.jobs.resolve(), gpu_slug(gpus[0].name)), args.only.split(","))
    to_do = tasks(run for run in map(measured, jobs) if run)
    begin = time.monotonic()
    # Not len(gpus): NVML also counts what CUDA_VISIBLE_DEVICES hides.
    failed, spent = compile_tasks(to_do, range(torch.cuda.device_count()), args.processes)
    print(*failed, sep="\n")
    print(*(f"{seconds:.0f} s: {name}" for name, seconds in spent.most_common(12)), sep="\n")
    print(
        f"{len(to_do)} tasks in {time.monotonic() - begin:.0f} s ({spent.total():.0f} s of all "
        f"processes, without their start); {len(failed)} cells failed"
    )


if __name__ == "__main__":
    main()
