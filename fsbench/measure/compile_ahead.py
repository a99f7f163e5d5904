"""Compile samplers in worker processes before anything is timed.

Workers only fill the on-disk caches of Triton, Inductor and FlashInfer: each verifies and calls its
samplers once. If a worker fails, the measuring process compiles the sampler itself.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch

from fsbench.discover import available, discover
from fsbench.errors import describe
from fsbench.inputs import TORCH_DTYPES, serving
from fsbench.measure.gate import GateKey, failed_checks, setting_of
from fsbench.measure.plan import Job
from fsbench.measure.server import end_with_server
from fsbench.measure.worker import Report
from fsbench.problem import Problem
from fsbench.provider import Kind, Provider
from fsbench.records.cell import Cell


@dataclass
class Compiled:
    """Results of the workers.

    first_call_s: seconds of a sampler's first call on a problem. passed: gates, each with "".
    phases: seconds of all tasks by kind ("gate", "first").
    """

    first_call_s: dict[tuple[str, Problem], float] = field(default_factory=dict)
    passed: dict[GateKey, str] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=lambda: {"gate": 0.0, "first": 0.0})


def compile_ahead(
    context: ForkServerContext, job: Job, cells: Sequence[Cell], report: Report
) -> Compiled:
    """Verify and call the samplers of these cells once, in job.warmers processes; end them all.

    One process has all cells of a sampler, since its problems share compiled code. Processes that
    are all silent for job.seconds are given up.
    """
    compiled = Compiled()
    by_sampler = sorted(cells, key=lambda cell: cell.provider)
    groups = [list(group) for _, group in groupby(by_sampler, key=lambda cell: cell.provider)]
    groups.sort(key=lambda group: cells.index(group[0]))
    count = min(job.warmers, len(groups))
    shares = [[cell for group in groups[i::count] for cell in group] for i in range(count)]
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for share in shares:
            parent_end, child_end = context.Pipe()
            process: BaseProcess = context.Process(
                target=main, args=(job, share, child_end), daemon=True
            )
            process.start()
            child_end.close()
            processes.append(process)
            pipes.append(parent_end)
        _collect(pipes, job, len(cells), report, compiled)
    finally:
        for process in processes:
            end(process)
        for pipe in pipes:
            pipe.close()
    return compiled


def _collect(
    pipes: Sequence[Connection], job: Job, total: int, report: Report, compiled: Compiled
) -> None:
    """Add the messages of all workers to `compiled`, until they end or are silent too long."""
    done, open_pipes = 0, list(pipes)
    report.report(0, total, "compiling ahead")
    while open_pipes and (ready := wait(open_pipes, job.seconds)):
        for pipe in cast(list[Connection], ready):
            try:
                task, name, problem, error, seconds = pipe.recv()
            except (EOFError, OSError):
                open_pipes.remove(pipe)
                continue
            if task == "first":
                done += 1
                report.report(0, total, f"compiling ahead: {done} of {total} cells, {name}")
            if not error:
                compiled.phases[task] += seconds
                if task == "first":
                    compiled.first_call_s[name, problem] = seconds
                else:
                    compiled.passed[name, setting_of(problem)] = ""


def end(process: BaseProcess) -> None:
    """End a process and what it started."""
    if process.pid:
        with suppress(OSError):  # its group does not exist yet, or has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def main(job: Job, cells: Sequence[Cell], pipe: Connection) -> None:
    """Run a worker process: send (task, sampler, problem, what was wrong or "", seconds)."""
    end_with_server()
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # the workers are parallel already
    # The import reads that variable, and takes seconds.
    autotune_cache = importlib.import_module("torch._inductor.runtime.autotune_cache")
    if job.device == "cuda":
        torch.cuda.set_device(job.indices[0])
    samplers = discover(map(Path, job.provider_paths))
    # Autotuning results of processes that run at the same time must not reach the measuring one.
    autotune_cache.AutotuneCache.create = staticmethod(lambda *_, **__: None)
    weights: dict[tuple[object, ...], torch.Tensor] = {}
    gates: set[GateKey] = set()
    with suppress(OSError):
        for cell in cells:
            problem = cell.problem
            key = (cell.provider, setting_of(problem))
            tasks = ["first"]
            if job.plan.check and cell.kind != str(Kind.LOWER_BOUND) and key not in gates:
                gates.add(key)
                tasks.insert(0, "gate")
            for task in tasks:
                begin, error = time.perf_counter(), ""
                try:
                    provider = available(samplers[cell.provider], job.device)
                    if task == "gate":
                        error = failed_checks(provider, problem)
                    else:
                        _call_once(provider, problem, weights)
                except BaseException as raised:  # the measuring process meets and reports it again
                    error = describe(raised)
                pipe.send((task, cell.provider, problem, error, time.perf_counter() - begin))
    os._exit(0)


def _call_once(
    provider: Provider, problem: Problem, weights: dict[tuple[object, ...], Any]
) -> None:
    """Build a sampler and call it on zeros. weights: keeps the last weight, by shape and dtype."""
    dtype = TORCH_DTYPES[problem.dtype]
    key = (problem.V, problem.D, dtype)
    if key not in weights:
        weights.clear()
        weights[key] = torch.zeros(problem.V, problem.D, dtype=dtype, device=problem.device)
    launch = serving(provider, problem.weights).build(problem, weights[key])
    counter = torch.zeros(1, dtype=torch.int64, device=problem.device)
    launch(weights[key].new_zeros(problem.B, problem.D), counter, counter)
    if problem.device == "cuda":
        torch.cuda.synchronize()
