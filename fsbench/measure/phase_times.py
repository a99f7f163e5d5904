"""Seconds of a run by phase.

Phases, in the order of a cell:

    start        start the process: imports, CUDA, the timer
    inputs       make weight and hidden
    gate         verify a sampler, once
    first call   build and call it once, compilation included
    check        check its tokens on the problem
    capture      capture the CUDA graph and warm up
    timing       the rounds
    beside       energy, sustained load, host time, forms
    other        between cells
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable


class PhaseTimes:
    """Seconds by phase: the time from one `enter` to the next belongs to the first.

    Args:
        since: when the first phase, "start", began; by default now.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, since: float | None = None
    ) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._phase = "start"
        self._since = clock() if since is None else since

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        now = self._clock()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase so far."""
        self.enter(self._phase)
        return dict(self._seconds)
