"""The host's clock, for samplers that run on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

from fsbench.timers.measurement import Measurement


class CpuTimer:
    """perf_counter_ns around a synchronous step; the span only.

    CPU caches are not flushed: an LM head is far larger than they are, so a step finds almost
    none of its weight there. align: called before each step, so that processes that work together
    start together.
    """

    name = "cpu"
    l2 = "n/a"

    def __init__(self, align: Callable[[], None] | None = None) -> None:
        self._align = align

    def measure(
        self, step: Callable[[], object], iterations: int, before: Callable[[], None]
    ) -> Measurement:
        """Measure steps, see `Timer.measure`."""
        span_us = []
        for _ in range(iterations):
            before()
            if self._align:
                self._align()
            start_ns = time.perf_counter_ns()
            step()
            span_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        return Measurement(span_us)
