"""Steps back to back: their energy, by NVML's counter of joules, and their time.

The counter advances every few tens of milliseconds, so steps are repeated for a second or so, and
energy, time and steps are counted from the first advance that is seen to the last. The queue of
the GPU is not to run dry while the host reads the counter, which can take it tens of milliseconds:
some chunks of steps are always queued behind the one that is waited for.
Nothing is subtracted: it is the whole GPU's energy, idle power included. The time is that between
events which follow the chunks, not the host's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from fsbench.errors import DeviceUnavailable
from fsbench.records.cell import Energy, Sustained

CHUNK_S = 0.01
"""Steps that are queued at once, in seconds: how late an advance of the counter is seen at most."""
CHUNK_READINGS = 4
"""A chunk is at least so many times as long as the counter takes to be read."""
AHEAD = 4
"""Chunks that are queued behind the one that is waited for."""
LEAD_S = 0.2
"""Steps before the counting begins: until the power has risen to what the steps draw."""
SHORTEST_S = 0.5
"""Of a loop: some ten advances of the counter, or more."""


class Queued(Protocol):
    """Work that the GPU has been given, such as a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until it is done."""

    def elapsed_time(self, later: Any) -> float:
        """Milliseconds from its end to that of a later one."""


class Reading(NamedTuple):
    """The state at one moment: host's clock (s), steps done, counter (mJ); the work just done."""

    at_s: float
    steps: int
    energy_mj: int | None
    work: Queued | None = None


def energy(
    queue: Callable[[int], Queued],
    counter_mj: Callable[[], int | None],
    seconds: float,
    idle_w: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Energy:
    """Repeat a step for about `seconds`, and LEAD_S before; what that took.

    Args:
        queue: gives the GPU this many steps.
        counter_mj: energy so far, None where there is no counter.
        idle_w: to be put into the result.

    Raises:
        DeviceUnavailable: there is no counter, or it stands still.
    """
    joules, took_s, steps = _between(_repeat(queue, counter_mj, seconds, clock))
    return Energy(joules, took_s, steps, idle_w)


def sustained(
    queue: Callable[[int], Queued],
    counter_mj: Callable[[], int | None],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Sustained:
    """As `energy`, and the time of a step by the events; without a counter the time alone."""
    readings = _repeat(queue, counter_mj, seconds, clock)
    first, last = readings[0], readings[-1]
    assert first.work and last.work
    steps = last.steps - first.steps
    try:
        joules, _, counted = _between(readings)
    except DeviceUnavailable:
        joules, counted = None, 1
    return Sustained(
        first.work.elapsed_time(last.work) * 1e3 / steps,
        steps,
        None if joules is None else joules / counted,
    )


def _repeat(
    queue: Callable[[int], Queued],
    counter_mj: Callable[[], int | None],
    seconds: float,
    clock: Callable[[], float],
) -> list[Reading]:
    """The readings of a loop of steps, one after each chunk, from LEAD_S on: two or more."""
    queue(1).synchronize()
    begin = clock()
    queue(1).synchronize()
    step_s = max(clock() - begin, 1e-6)
    begin = clock()
    counter_mj()
    chunk = max(1, round(max(CHUNK_S, CHUNK_READINGS * (clock() - begin)) / step_s))
    begin = clock()
    running = deque(queue(chunk) for _ in range(AHEAD))
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


def idle_watts(
    counter_mj: Callable[[], int | None],
    seconds: float = 1.0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> float:
    """Power of a GPU that has nothing to do, by the same counter. Raises as `energy`."""
    begin = clock()
    readings: list[Reading] = []
    while not readings or readings[-1].at_s < begin + LEAD_S + seconds:
        sleep(CHUNK_S / 2)
        readings.append(Reading(clock(), 0, counter_mj()))
    joules, took_s, _ = _between([each for each in readings if each.at_s >= begin + LEAD_S])
    return joules / took_s


def _between(readings: list[Reading]) -> tuple[float, float, int]:
    """Joules, seconds, steps from the first to the last reading at which the counter advanced."""
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
