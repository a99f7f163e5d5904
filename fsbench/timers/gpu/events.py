"""CUDA events around a step: for several GPUs, and where CUPTI cannot run."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsbench.errors import TimerUnavailable
from fsbench.timers.gpu.l2 import L2Flush
from fsbench.timers.measurement import Measurement

_DELAY_CYCLES = 1_000_000  # of the SM clock: about 0.5 ms at 2 GHz


class EventsTimer:
    """Time between two events on the current stream, resolution about half a microsecond.

    A spinning kernel is queued first, so the host has queued the events and the step before the
    device reaches them. Included: the step's kernels, the gaps between them on the device, and
    the device's own latency from the first event to the first kernel and from the last kernel to
    the second event (a few microseconds in all, which `cupti` does not count). Not included: the
    host's launch time, as long as the step is queued within the delay (0.5 ms) and never waits
    for the device; a step that does wait is timed with the host in it. Work on another stream is
    seen only if the current stream waits for it. The span only.

    align: queued right before the first event, so that GPUs that work together start together.
    """

    name = "events"

    def __init__(self, device: str, l2: str, align: Callable[[], None] | None = None) -> None:
        if not torch.cuda.is_available():
            raise TimerUnavailable("timer events: torch sees no CUDA device; see `fsbench doctor`")
        self.l2 = l2
        self._device = device
        self._flush = L2Flush(l2, device)
        self._align = align

    def measure(
        self, step: Callable[[], object], iterations: int, before: Callable[[], None]
    ) -> Measurement:
        """Measure steps, see `Timer.measure`."""
        span_us = []
        with torch.cuda.device(self._device):
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            for _ in range(iterations):
                before()
                self._flush()
                torch.cuda._sleep(_DELAY_CYCLES)
                if self._align:
                    self._align()
                start.record()
                step()
                end.record()
                end.synchronize()
                span_us.append(start.elapsed_time(end) * 1e3)
        return Measurement(span_us)
