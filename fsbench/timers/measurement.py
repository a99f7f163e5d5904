"""The measurement that every timer returns, and the protocol of timers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class Measurement:
    """Raw samples of one call of `Timer.measure`, in microseconds.

    span_us has one entry per iteration: last end - first start. busy_us (union of the GPU
    activities' intervals) and sum_us (their sum) have as many, or none for timers that do not see
    activities. n_kernels is the median number of activities (kernels, copies, memsets) in an
    iteration; kernels maps the name of an activity to its mean time per iteration.
    """

    span_us: list[float]
    busy_us: list[float] = field(default_factory=list)
    sum_us: list[float] = field(default_factory=list)
    n_kernels: int | None = None
    kernels: dict[str, float] = field(default_factory=dict)


class Timer(Protocol):
    """Measures a step. `name` and `l2` (cold, cold-write, warm, n/a) are columns of results."""

    name: str
    l2: str

    def measure(
        self, step: Callable[[], object], iterations: int, before: Callable[[], None]
    ) -> Measurement:
        """Time `step()` `iterations` times, on the device and stream that are current.

        `before()` runs untimed ahead of each iteration, then the L2 cache is brought to the
        state that `l2` names, then `step()` is timed: an eager launch or a graph replay.
        `iterations` is at least 1.
        """
        ...
