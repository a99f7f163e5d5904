"""The timers of GPUs, what the L2 cache holds when a step starts, and the clock meanwhile.

May import: timers.measurement, the contract.
"""

from typing import TYPE_CHECKING

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.timers.gpu import cupti as cupti
    from fsbench.timers.gpu import events as events
    from fsbench.timers.gpu import sm_clock as sm_clock

# They need torch, which a CPU's timer does without.
__getattr__ = lazy_getattr(__name__, "cupti", "events", "sm_clock")
