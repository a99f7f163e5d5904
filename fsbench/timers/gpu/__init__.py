"""The timers of GPUs, and what the L2 cache holds when a step starts.

May import: timers.measurement, the contract.
"""

from typing import TYPE_CHECKING

from fsbench.late import late

if TYPE_CHECKING:
    from fsbench.timers.gpu import cupti as cupti
    from fsbench.timers.gpu import events as events

# They need torch, which a CPU's timer does without.
__getattr__ = late(__name__, "cupti", "events")
