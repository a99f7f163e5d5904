"""Choose tile shapes by time, for `fsbench tune`.

On one problem (a bucket's largest B, and an LM head) each config of a kernel is compiled, draws
once and is held to the oracle, and is then timed in rounds that interleave the configs. A bucket
gets one config for all D if one is about the fastest on all of them, else one for each range of D.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor

from fsbench import inputs, reference
from fsbench.cores import usable_cores
from fsbench.discover import available, discover
from fsbench.errors import describe
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tuning
from fsbench.timers import Timer

SLACK = 1.005
"""Times vary by this factor: a config is as good as the fastest within it."""
ROUNDS = 3
ITERATIONS = 10
_WORKERS = 16  # each has a CUDA context, half a GB of the GPU's memory


@dataclass(frozen=True)
class Timing:
    """A config's median time on a problem; None if it was not timed, and `note` says why."""

    problem: Problem
    config: Any
    in_use: bool
    median_us: float | None
    note: str = ""


def measure(
    provider: Provider,
    paths: Sequence[Path],
    problems: Sequence[Problem],
    limit: int | None,
    timer: Timer,
    report: Callable[[float, int, str], None],
) -> Iterator[list[Timing]]:
    """Time a kernel's configs, at most `limit` of them; yield the timings of each problem.

    Args:
        provider: has a `tuning`; discover(paths) lists it.
        problems: those that share a weight are adjacent.
        report: see `Recorder.report`; a cell is a config on a problem.
    """
    tuning = tuning_of(provider)
    todo = {problem: tuning.configs(problem)[:limit] for problem in problems}
    total = sum(map(len, todo.values()))
    done = 0.0
    # The code for one D and V serves all.
    jobs = {(problem.B, config): problem for problem in todo for config in todo[problem]}
    notes: dict[tuple[int, Any], str] = {}
    report(done, total, f"{tuning.kernel}: compiling")
    for B, config, note in _compile_all(provider.name, paths, jobs):
        notes[B, config] = note
        done += total / len(jobs) / 2
        report(done, total, f"{tuning.kernel}: compiling")
    for (D, V), group in groupby(problems, lambda problem: (problem.D, problem.V)):
        weight = None
        for problem in group:
            report(done, total, f"{tuning.kernel}: B={problem.B} D={D} V={V}")
            if weight is None:
                weight = inputs.make_weight(problem, 0)
            configs = {config: notes[problem.B, config] for config in todo[problem]}
            yield time_configs(provider, problem, weight, configs, timer)
            done += len(configs) / 2
    report(total, total, "done")


def tuning_of(provider: Provider) -> Tuning:
    """Return the tuning of a provider that has one."""
    assert provider.tuning is not None
    return provider.tuning


def _compile_all(
    name: str, paths: Sequence[Path], jobs: Mapping[tuple[int, Any], Problem]
) -> Iterator[tuple[int, Any, str]]:
    """Compile configs in parallel processes, into Triton's cache on disk.

    Yields (B, config, "" or why it cannot run) as they are done.
    """
    workers = max(1, min(_WORKERS, len(jobs), usable_cores() - 1))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = {
            pool.submit(_compile, name, paths, problem, config): (B, config)
            for (B, config), problem in jobs.items()
        }
        for future in as_completed(futures):
            yield *futures[future], future.result()


def _compile(name: str, paths: Sequence[Path], problem: Problem, config: Any) -> str:
    """Compile a config by a launch on a small vocabulary, which has the same code."""
    small = replace(problem, V=min(problem.V, 1024))
    try:
        provider = available(discover(paths)[name], problem.device)
        weight, hidden = inputs.make_weight(small, 0), inputs.make_hidden(small, 0)
        _step(tuning_of(provider).build(small, weight, config), hidden)()
        if problem.device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # too much shared memory or registers: a fact about the config
        return describe(error)
    return ""


def _step(launch: Launch, hidden: Tensor) -> Callable[[], Tensor]:
    counter = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    return lambda: launch(hidden, counter, counter)


def time_configs(
    provider: Provider, problem: Problem, weight: Tensor, configs: dict[Any, str], timer: Timer
) -> list[Timing]:
    """Check and time configs on a problem; the first is the one in use.

    configs: each with "", or why it cannot run.
    """
    hidden = inputs.make_hidden(problem, 0)
    counter = torch.zeros(1, dtype=torch.int64, device=hidden.device)
    expected = reference.expect(
        hidden.float() @ weight.float().T,
        counter,
        counter,
        0.0 if provider.kind is Kind.GREEDY else problem.temperature,
        provider.capabilities.noise or "token",
        logits_error=reference.matmul_error(hidden, weight),
    )
    notes = dict(configs)
    steps = {}
    for config in configs:
        if notes[config]:
            continue
        try:
            step = _step(tuning_of(provider).build(problem, weight, config), hidden)
            if expected.accepts(step()).all():
                steps[config] = step
            else:
                notes[config] = "wrong tokens"
        except Exception as error:
            notes[config] = describe(error)
    del expected
    samples: dict[Any, list[float]] = {config: [] for config in steps}
    for _ in range(ROUNDS):
        for config, step in steps.items():
            samples[config] += timer.measure(step, ITERATIONS, lambda: None).span_us
    return [
        Timing(
            problem,
            config,
            in_use=number == 0,
            median_us=median(samples[config]) if config in samples else None,
            note=note,
        )
        for number, (config, note) in enumerate(notes.items())
    ]


def select(timings: Sequence[Timing]) -> list[tuple[int | None, Any]]:
    """The choice for one bucket: (largest D or None for any, config), by ascending D.

    A config is good for a D if it is within SLACK of the fastest there; neighboring D share a
    config as long as one is good for all of them. Of several, one in use stays; else the fastest.
    """
    by_d = _times_by_d(timings)
    in_use = {timing.config for timing in timings if timing.in_use}
    groups: list[tuple[list[int], set[Any]]] = []
    for D, times in by_d.items():
        good = {config for config, us in times.items() if us <= SLACK * min(times.values())}
        if groups and groups[-1][1] & good:
            groups[-1] = ([*groups[-1][0], D], groups[-1][1] & good)
        else:
            groups.append(([D], good))
    rows = []
    for number, (sizes, good) in enumerate(groups):
        following = groups[number + 1][0][0] if number + 1 < len(groups) else None
        best = min(good, key=lambda c: (c not in in_use, prod(by_d[D][c] for D in sizes), str(c)))
        rows.append((None if following is None else (sizes[-1] + following) // 2, best))
    return rows


def _times_by_d(timings: Sequence[Timing]) -> dict[int, dict[Any, float]]:
    """D, ascending -> config -> microseconds: over the V of that D, if each has a time."""
    by_d: dict[int, dict[Any, float]] = {}
    for D in sorted({timing.problem.D for timing in timings}):
        of_d = [timing for timing in timings if timing.problem.D == D]
        heads = len({timing.problem.V for timing in of_d})
        times: dict[Any, list[float]] = {}
        for timing in of_d:
            if timing.median_us is not None:
                times.setdefault(timing.config, []).append(timing.median_us)
        kept = {config: geometric_mean(us) for config, us in times.items() if len(us) == heads}
        if kept:
            by_d[D] = kept
    return by_d
