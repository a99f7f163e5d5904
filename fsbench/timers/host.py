"""Timers without a GPU: the host's clock, and made-up times for tests of the harness."""

from __future__ import annotations

import random
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


class FakeTimer:
    """Deterministic samples base * (1 + jitter * u), u uniform in [0, 1) from `seed`.

    base_us is a time in microseconds, or a function called after each `step()`, so that a test's
    sampler can decide how long it took. Steps do run, so their errors surface.
    """

    name = "fake"
    l2 = "n/a"

    def __init__(
        self, base_us: float | Callable[[], float] = 100.0, jitter: float = 0.02, seed: int = 0
    ) -> None:
        self._base_us = base_us
        self._jitter = jitter
        self._random = random.Random(seed)

    def measure(
        self, step: Callable[[], object], iterations: int, before: Callable[[], None]
    ) -> Measurement:
        """Return made-up times, see `Timer.measure`, as if a step were one kernel."""
        span_us = []
        for _ in range(iterations):
            before()
            step()
            base_us = self._base_us() if callable(self._base_us) else self._base_us
            span_us.append(base_us * (1 + self._jitter * self._random.random()))
        kernels = {"fake_kernel": sum(span_us) / iterations}
        return Measurement(span_us, list(span_us), list(span_us), 1, kernels)
