"""Energy of a step, by the counter of joules that NVML reads from the GPU.

The counter advances every few tens of milliseconds, so steps are repeated for a second or so, and
energy, time and steps are counted from the first advance that is seen to the last. The queue of
the GPU never runs dry: the next chunk of steps is queued before the last one is waited for.
Nothing is subtracted: it is the whole GPU's energy, idle power included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple, Protocol

from fsbench.errors import DeviceUnavailable
from fsbench.records.cell import Energy

CHUNK_S = 0.01
"""Steps that are queued at once, in seconds: how late an advance of the counter is seen at most."""
LEAD_S = 0.2
"""Steps before the counting begins: until the power has risen to what the steps draw."""
SHORTEST_S = 0.5
"""Of a loop: some ten advances of the counter, or more."""


class Queued(Protocol):
    """Work that the GPU has been given, such as a torch.cuda.Event."""

    def synchronize(self) -> None:
        """Wait until it is done."""


class Reading(NamedTuple):
    """The state at one moment: host's clock (s), steps done, counter (mJ)."""

    at_s: float
    steps: int
    energy_mj: int


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
    queue(1).synchronize()
    begin = clock()
    queue(1).synchronize()
    chunk = max(1, round(CHUNK_S / max(clock() - begin, 1e-6)))
    begin = clock()
    running = queue(chunk)
    steps = 0
    readings: list[Reading] = []
    while not readings or readings[-1].at_s < begin + LEAD_S + seconds:
        following = queue(chunk)
        running.synchronize()
        steps += chunk
        readings.append(Reading(clock(), steps, _known(counter_mj())))
        running = following
    running.synchronize()
    first, last = _ends([each for each in readings if each.at_s >= begin + LEAD_S])
    return Energy(
        (last.energy_mj - first.energy_mj) / 1e3,
        last.at_s - first.at_s,
        last.steps - first.steps,
        idle_w,
    )


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
        readings.append(Reading(clock(), 0, _known(counter_mj())))
    first, last = _ends([each for each in readings if each.at_s >= begin + LEAD_S])
    return (last.energy_mj - first.energy_mj) / 1e3 / (last.at_s - first.at_s)


def _known(energy_mj: int | None) -> int:
    if energy_mj is None:
        raise DeviceUnavailable("energy: NVML has no counter of energy for this GPU")
    return energy_mj


def _ends(readings: list[Reading]) -> tuple[Reading, Reading]:
    """The first and the last reading at which the counter had just advanced."""
    advances = [after for before, after in pairwise(readings) if after.energy_mj > before.energy_mj]
    if len(advances) < 2:
        raise DeviceUnavailable(
            f"energy: expected NVML's counter to advance; it did so {len(advances)} times in "
            f"{readings[-1].at_s - readings[0].at_s:.1f} s"
        )
    return advances[0], advances[-1]
