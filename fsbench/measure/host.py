"""What an eager call costs the host: the time until it has been queued."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from fsbench.records.cell import Host

CALLS = 25
"""Queued at once: of a sampler of many kernels more would fill the GPU's queue, and wait."""
CHUNKS = 9
LONGEST_S = 0.5


def told_apart(device: str) -> bool:
    """Whether a call returns before its work is done; on a CPU it does not."""
    return device != "cpu"


def host_time(
    call: Callable[[], object],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Host:
    """The median over up to CHUNKS of the mean of CALLS calls, which nobody waits for.

    wait: returns when the device has done all that was queued.
    """
    begin = clock()
    means: list[float] = []
    while not means or (len(means) < CHUNKS and clock() - begin < LONGEST_S):
        wait()
        start = clock()
        for _ in range(CALLS):
            call()
        means.append((clock() - start) / CALLS * 1e6)
    wait()
    return Host(median(means), CALLS * len(means))
