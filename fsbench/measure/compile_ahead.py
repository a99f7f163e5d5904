"""Compiling ahead: before anything is timed, several processes verify and call each sampler once.

What they compile is on disk, where the process that measures finds it (Triton's, Inductor's and
FlashInfer's caches). What one of them has not done, or not well, the measuring process does itself.
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
from fsbench.inputs import TORCH_DTYPES, serving
from fsbench.measure.gate import gate, setting_of
from fsbench.measure.plan import Job
from fsbench.measure.recorder import GateKey
from fsbench.measure.server import end_with_server
from fsbench.measure.worker import Report
from fsbench.problem import Problem
from fsbench.provider import Kind, Provider
from fsbench.records.cell import Cell


@dataclass
class Compiled:
    """What was done ahead.

    seconds: of a sampler's first call on a problem. passed: gates, each with "". spent: seconds of
    all tasks together, by kind ("gate", "first").
    """

    seconds: dict[tuple[str, Problem], float] = field(default_factory=dict)
    passed: dict[GateKey, str] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=lambda: {"gate": 0.0, "first": 0.0})


def compile_ahead(
    context: ForkServerContext, job: Job, cells: Sequence[Cell], report: Report
) -> Compiled:
    """Verify and call the samplers of these cells once, in job.warmers processes; end them all.

    One process has all cells of a sampler, since what its problems share is compiled once. The rest
    is left to the measuring process when all are silent for job.seconds.
    """
    found = Compiled()
    by_sampler = sorted(cells, key=lambda cell: cell.provider)
    groups = [list(group) for _, group in groupby(by_sampler, key=lambda cell: cell.provider)]
    groups.sort(key=lambda group: cells.index(group[0]))
    count = min(job.warmers, len(groups))
    shares = [[cell for group in groups[i::count] for cell in group] for i in range(count)]
    processes: list[BaseProcess] = []
    lines: list[Connection] = []
    try:
        for share in shares:
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(
                target=main, args=(job, share, theirs), daemon=True
            )
            process.start()
            theirs.close()
            processes.append(process)
            lines.append(ours)
        _listen(lines, job, len(cells), report, found)
    finally:
        for process in processes:
            end(process)
        for line in lines:
            line.close()
    return found


def _listen(
    lines: Sequence[Connection], job: Job, total: int, report: Report, found: Compiled
) -> None:
    done, left = 0, list(lines)
    report.report(0, total, "compiling ahead")
    while left and (ready := wait(left, job.seconds)):
        for line in cast(list[Connection], ready):
            try:
                kind, name, problem, passed, seconds = line.recv()
            except (EOFError, OSError):
                left.remove(line)
                continue
            if kind == "first":
                done += 1
                report.report(0, total, f"compiling ahead: {done} of {total} cells, {name}")
            if passed:
                found.spent[kind] += seconds
                if kind == "first":
                    found.seconds[name, problem] = seconds
                else:
                    found.passed[name, setting_of(problem)] = ""


def end(process: BaseProcess) -> None:
    """End a process and what it started."""
    if process.pid:
        with suppress(OSError):  # there is no such group, or no more
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def main(job: Job, cells: Sequence[Cell], line: Connection) -> None:
    """The whole of a process: tell (kind, sampler, problem, whether it went well, seconds)."""
    end_with_server()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there are processes enough
    # Reads that, and takes seconds.
    autotune_cache = importlib.import_module("torch._inductor.runtime.autotune_cache")
    if job.device == "cuda":
        torch.cuda.set_device(job.indices[0])
    known = discover(map(Path, job.provider_paths), job.reasons)
    # What several processes at once find fastest is not to be kept for the one that measures.
    autotune_cache.AutotuneCache.create = staticmethod(lambda *_, **__: None)
    weights: dict[tuple[object, ...], torch.Tensor] = {}
    gates: set[GateKey] = set()
    with suppress(OSError):
        for cell in cells:
            problem = cell.problem
            key = (cell.provider, setting_of(problem))
            kinds = ["first"]
            if job.plan.check and cell.kind != str(Kind.LOWER_BOUND) and key not in gates:
                gates.add(key)
                kinds.insert(0, "gate")
            for kind in kinds:
                begin = time.perf_counter()
                try:
                    provider = available(known[cell.provider], job.device)
                    passed = True
                    if kind == "gate":
                        passed = not gate(provider, problem)
                    else:
                        _call_once(provider, problem, weights)
                except BaseException:  # the measuring process finds it again, and says so
                    passed = False
                seconds = time.perf_counter() - begin
                line.send((kind, cell.provider, problem, passed, seconds))
    os._exit(0)


def _call_once(
    provider: Provider, problem: Problem, weights: dict[tuple[object, ...], Any]
) -> None:
    """As the first call of the measuring process, on zeros. weights: the last one, kept."""
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
