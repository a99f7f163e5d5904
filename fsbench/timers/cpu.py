"""The host's clock, for samplers that run on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

from fsbench.timers.measurement import Measurement


class CpuTimer:
    """perf_counter_ns around a synchronous step; the span only.

    CPU caches are not flushed: an LM head is far larger than they are, so a step finds almost
    none of its weight there.
    """

    name = "cpu"
    l2 = "n/a"

    def measure(
        self, step: Callable[[], object], iterations: int, before: Callable[[], None]
    ) -> Measurement:
        """See `Timer.measure`."""
        span_us = []
        for _ in range(iterations):
            before()
            start_ns = time.perf_counter_ns()
            step()
            span_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        return Measurement(span_us)
