"""The timers: `make_timer` is the way to one. Importing this package does not import torch.

cupti   GPU activity records: span, busy and sum of the kernels themselves (the headline)
events  CUDA events around the step: for several GPUs, and where CUPTI cannot run
cpu     the host's clock, for samplers that run on the CPU
fake    made-up times, for tests of the harness
auto    cupti on a GPU, cpu on a CPU; resolved by `timer_name`, never a fallback

May import: the contract.
"""

from __future__ import annotations

from collections.abc import Callable

from fsbench.errors import InvalidArgument, TimerUnavailable, unknown_name
from fsbench.timers import gpu
from fsbench.timers.host import CpuTimer, FakeTimer
from fsbench.timers.measurement import Measurement, Timer

__all__ = ["L2_STATES", "TIMERS", "Measurement", "Timer", "make_timer", "timer_name"]

TIMERS = ("auto", "cupti", "events", "cpu", "fake")

L2_STATES = ("cold", "cold-write", "warm")
"""What the L2 cache holds when a step starts: see fsbench.timers.gpu.l2."""


def timer_name(name: str, device: str, is_parallel: bool = False) -> str:
    """Return the name of the timer that measures on a device; resolves `auto`.

    Args:
        device: "cuda", "cuda:1" or "cpu".
        is_parallel: ranks are measured together. `cupti` sees one GPU only, and not when the
            others began.

    Raises:
        TimerUnavailable: the timer cannot measure on such a device. There is no fallback.
    """
    if name not in TIMERS:
        raise unknown_name("timer", name, TIMERS)
    if name == "cupti" and is_parallel:
        raise InvalidArgument("--timer: expected events with several GPUs; got cupti")
    if name == "auto":
        return "cpu" if device == "cpu" else "events" if is_parallel else "cupti"
    if name == "cpu" and device != "cpu":
        raise TimerUnavailable(
            f"timer cpu: sees launches only, not the work of {device}; use cupti or events"
        )
    if name in ("cupti", "events") and device == "cpu":
        raise TimerUnavailable(f"timer {name}: needs a CUDA device, got device cpu; use cpu")
    return name


def make_timer(
    name: str, device: str, l2: str = "cold", align: Callable[[], None] | None = None
) -> Timer:
    """Return a timer that is ready to measure steps on a device.

    Args:
        l2: the state of the L2 cache that GPU timers make before each iteration.
        align: makes the next steps of all ranks start together (fsbench.measure.distributed).

    Raises:
        TimerUnavailable: the timer cannot run here; the message has the reason and the fix.
    """
    name = timer_name(name, device, align is not None)
    if l2 not in L2_STATES:
        raise unknown_name("l2", l2, L2_STATES)
    if name == "fake":
        return FakeTimer()
    if name == "cpu":
        return CpuTimer(align)
    if name == "events":
        return gpu.events.EventsTimer(device, l2, align)
    return gpu.cupti.CuptiTimer(device, l2)
