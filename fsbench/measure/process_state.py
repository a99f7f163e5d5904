"""State of the measuring process that a sampler can change, restored after each of its turns."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from typing import Any

import torch

from fsbench.errors import VerificationFailed

CLOCKS = ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "sleep")
"""Functions of the module time that timers and the harness call."""

_IDLE_S = 0.03
_SETTLE_S = 2.0  # in which threads of a library that wait actively come to rest
_BUSY = 0.05  # part of a core, which other processes may use as well
_ALARMS = {
    signal.ITIMER_REAL: signal.SIGALRM,
    signal.ITIMER_VIRTUAL: signal.SIGVTALRM,
    signal.ITIMER_PROF: signal.SIGPROF,
}


class SpoiledProcess(VerificationFailed):
    """A sampler changed its process in a way that cannot be undone: the process has to end."""


class ProcessState:
    """Clocks, interval timers and settings of torch at the time of construction."""

    def __init__(self) -> None:
        self._clocks = {name: getattr(time, name) for name in CLOCKS}
        self._handlers = {
            timer: signal.getsignal(number)
            for timer, number in _ALARMS.items()
            if signal.getitimer(timer) == (0.0, 0.0)  # a running one belongs to someone else
        }
        self._torch = _torch_settings()

    def restore(self) -> list[str]:
        """Undo what differs; return its names."""
        changed = []
        for name, clock in self._clocks.items():
            if getattr(time, name) is not clock:
                setattr(time, name, clock)
                changed.append(f"time.{name}")
        for timer, handler in self._handlers.items():
            number = _ALARMS[timer]
            if signal.getitimer(timer) != (0.0, 0.0):
                signal.setitimer(timer, 0)
                changed.append(f"the interval timer of {number.name}")
            if signal.getsignal(number) is not handler:
                with suppress(TypeError):  # a handler that is not of Python
                    signal.signal(number, handler)
                changed.append(f"the handler of {number.name}")
        for name, value in _torch_settings().items():
            if value != (original := self._torch[name]):
                getattr(torch, f"set_{name}")(original)
                changed.append(f"torch's {name}")
        return changed

    def require_idle(self) -> None:
        """Raise SpoiledProcess if threads still work: they would slow the next samplers down."""
        end = self._clocks["monotonic"]() + _SETTLE_S
        while True:
            before, begin = _other_threads_s(), self._clocks["perf_counter"]()
            self._clocks["sleep"](_IDLE_S)
            passed = self._clocks["perf_counter"]() - begin
            if _other_threads_s() - before < _BUSY * passed:
                return
            if self._clocks["monotonic"]() > end:
                raise SpoiledProcess("it leaves threads running after its calls")


def _other_threads_s() -> float:
    """Return the CPU time of the other threads of this process, s."""
    return time.process_time() - time.thread_time()


def _torch_settings() -> dict[str, Any]:
    return {"default_dtype": torch.get_default_dtype(), "num_threads": torch.get_num_threads()}
