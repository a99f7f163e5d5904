"""Cores of an engine's processes: the same for every sampler, and the same in every run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def family(pid: int) -> list[int]:
    """A process and all that it started, as far as they live, in the order of their ids."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*"):
            try:
                found += map(int, (task / "children").read_text().split())
            except OSError:  # it has ended
                continue
    return [pid, *sorted(found[1:])]


def shares(cores: Sequence[int], processes: int) -> list[list[int]]:
    """Cores of each process: as many for each, neighbours. [] if there is less than one each."""
    each = len(cores) // processes
    if not each:
        return []
    return [list(cores[i * each : (i + 1) * each]) for i in range(processes)]


def pin(pid: int) -> list[list[int]]:
    """Give each process of a family cores of its own, of those that this process may use.

    All threads of a process get them. Returns the cores, in the order of `family`; [] if there are
    too few, or none can be given.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []
    processes = family(pid)
    given = shares(sorted(os.sched_getaffinity(0)), len(processes))
    for process, cores in zip(processes, given, strict=False):
        for task in Path(f"/proc/{process}/task").glob("*"):
            try:
                os.sched_setaffinity(int(task.name), cores)
            except ProcessLookupError:  # a thread that has ended
                continue
    return given
