"""FlashSampling without the noise: the argmax of the logits, in the same kernel.

The time of sampling is the difference to this sampler.
"""

from __future__ import annotations

from functools import partial

from fsbench.kernels.providing.launches import FlashSampling
from fsbench.provider import Capabilities, Kind, Provider

PROVIDER = Provider(
    name="flash_sampling_greedy",
    label="FlashSampling, greedy",
    kind=Kind.GREEDY,
    requires=("triton",),
    capabilities=Capabilities(
        zero_temperature=True, fused=True, host_sync_free=True, batch_invariant=True
    ),
    build=partial(FlashSampling, temperature=0.0),  # whatever the problem's is
    presets=("lean",),
)
