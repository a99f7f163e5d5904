"""FlashSampling without the noise: the argmax of the logits, in the same kernel.

What sampling costs is the difference to this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.kernels.providing.launches import FlashSampling
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    """See Provider. The problem's temperature has no influence."""
    return FlashSampling(problem, weight, temperature=0.0)


PROVIDER = Provider(
    name="flash_sampling_greedy",
    label="FlashSampling, greedy",
    kind=Kind.GREEDY,
    requires=("triton",),
    capabilities=Capabilities(
        zero_temperature=True, fused=True, host_sync_free=True, batch_invariant=True
    ),
    build=build,
    presets=("lean",),
)
