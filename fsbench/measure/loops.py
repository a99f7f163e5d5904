"""Loops of calls that measure more than a step's time: energy, back-to-back time, host time.

NVML's counter of joules advances every few tens of milliseconds, so steps are repeated for a second
or so, and energy is counted from the first advance that is seen to the last. The GPU's queue must
not run empty while the host reads the counter, which can take tens of milliseconds: some chunks of
steps are always queued behind the one that is waited for. Idle power is not subtracted. Time is
taken from events that follow the chunks, not from the host's clock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

from fsbench.errors import DeviceUnavailable
from fsbench.records.cell import Host, Loop

CHUNK_S = 0.01
"""Seconds of steps that are queued at once: an advance of the counter is seen at most so late."""
CHUNK_READINGS = 4
"""Least length of a chunk, in times that the counter takes to be read."""
CHUNKS_AHEAD = 4
"""Chunks that are queued behind the one that is waited for."""
LEAD_S = 0.2
"""Seconds of steps before the counting begins, in which the power rises."""
SHORTEST_S = 0.5
"""Least seconds of a loop: about ten advances of the counter."""

HOST_CALLS = 25
"""Calls that are queued at once: more might fill the GPU's queue, and then a call waits."""
HOST_CHUNKS = 9
HOST_LONGEST_S = 0.5


class Queued(Protocol):
    """Work that was given to the GPU, such as a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until it is done."""

    def elapsed_time(self, later: Any) -> float:
        """Return the milliseconds from its end to the end of later work."""


class Reading(NamedTuple):
    """Host's clock (s), steps done, counter (mJ) and the work just done, at one moment."""

    at_s: float
    steps: int
    energy_mj: int | None
    work: Queued | None = None


def run_loop(
    queue: Callable[[int], Queued],
    counter_mj: Callable[[], int | None],
    seconds: float,
    idle_w: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Loop:
    """Repeat a step for about `seconds`, and LEAD_S before; return its time and energy.

    Args:
        queue: gives the GPU this many steps.
        counter_mj: energy so far, None where there is no counter.
        idle_w: power of the idle GPU. With it energy is required, without it optional.

    Raises:
        DeviceUnavailable: energy is required, and there is no counter or it does not advance.
    """
    readings = _repeat(queue, counter_mj, seconds, clock)
    first, last = readings[0], readings[-1]
    assert first.work and last.work
    steps = last.steps - first.steps
    try:
        joules, _, counted = _between_advances(readings)
    except DeviceUnavailable:
        if idle_w is not None:
            raise
        joules, counted = None, 1
    return Loop(
        steps=steps,
        seconds=first.work.elapsed_time(last.work) / 1e3,
        joules=None if joules is None else joules * steps / counted,
        idle_w=idle_w,
    )


def idle_watts(
    counter_mj: Callable[[], int | None],
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Return the power of an idle GPU, by the same counter.

    Raises:
        DeviceUnavailable: as `run_loop` with idle_w.
    """
    begin = clock()
    readings: list[Reading] = []
    while not readings or readings[-1].at_s < begin + LEAD_S + seconds:
        sleep(CHUNK_S / 2)
        readings.append(Reading(clock(), 0, counter_mj()))
    counted = [reading for reading in readings if reading.at_s >= begin + LEAD_S]
    joules, passed_s, _ = _between_advances(counted)
    return joules / passed_s


def host_time(
    call: Callable[[], object],
    wait: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Host:
    """Return the host's time of an eager call: the time until it is queued.

    The median over up to HOST_CHUNKS of the mean of HOST_CALLS calls that are not waited for.

    Args:
        wait: returns when the device has done all that was queued.
    """
    begin = clock()
    means: list[float] = []
    while not means or (len(means) < HOST_CHUNKS and clock() - begin < HOST_LONGEST_S):
        wait()
        start = clock()
        for _ in range(HOST_CALLS):
            call()
        means.append((clock() - start) / HOST_CALLS * 1e6)
    wait()
    return Host(median(means), HOST_CALLS * len(means))


def _repeat(
    queue: Callable[[int], Queued],
    counter_mj: Callable[[], int | None],
    seconds: float,
    clock: Callable[[], float],
) -> list[Reading]:
    """Return a reading after each chunk of a loop, from LEAD_S on: two or more."""
    queue(1).synchronize()
    begin = clock()
    queue(1).synchronize()
    step_s = max(clock() - begin, 1e-6)
    begin = clock()
    counter_mj()
    chunk = max(1, round(max(CHUNK_S, CHUNK_READINGS * (clock() - begin)) / step_s))
    begin = clock()
    running = deque(queue(chunk) for _ in range(CHUNKS_AHEAD))
    steps = 0
    readings: list[Reading] = []
    while len(readings) < 2 or readings[-1].at_s < begin + LEAD_S + seconds:
        running.append(queue(chunk))
        done = running.popleft()
        done.synchronize()
        steps += chunk
        reading = Reading(clock(), steps, counter_mj(), done)
        if reading.at_s >= begin + LEAD_S:
            readings.append(reading)
    running[-1].synchronize()
    return readings


def _between_advances(readings: list[Reading]) -> tuple[float, float, int]:
    """Return joules, seconds and steps from the first advance of the counter to the last."""
    advances: list[tuple[int, Reading]] = []
    for before, after in pairwise(readings):
        if before.energy_mj is None or after.energy_mj is None:
            raise DeviceUnavailable("energy: NVML has no counter of energy for this GPU")
        if after.energy_mj > before.energy_mj:
            advances.append((after.energy_mj, after))
    if len(advances) < 2:
        raise DeviceUnavailable(
            f"energy: expected NVML's counter to advance; it did so {len(advances)} times in "
            f"{readings[-1].at_s - readings[0].at_s:.1f} s"
        )
    (from_mj, first), (to_mj, last) = advances[0], advances[-1]
    return (to_mj - from_mj) / 1e3, last.at_s - first.at_s, last.steps - first.steps
