"""FlashSampling from a screened head: about half of the bytes of the weight (screened-head.md).

An int8 copy of the head gives every logit within a proven bound; the few tokens that may win are
computed from the weight, in the order of the fused kernels. Tokens are those of
flash_sampling_token. The copy takes half as much memory as the weight.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsbench.kernels.providing.launches import FULL_CONTRACT, accept, noise_map
from fsbench.kernels.providing.screened import (
    ScreenedLaunch,
    build_sharded,
    kept_bytes,
    unsupported_reason,
)
from fsbench.kernels.providing.tuning import tuning
from fsbench.provider import Kind, Provider

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.launch.result import Screened


def sample(hidden: Tensor, weight: Tensor, **options: Any) -> Screened:
    """Prepare the head, at every call, and draw from it."""
    from fsbench.kernels.screened.api import screened_sample
    from fsbench.kernels.screened.head import prepare_head

    return screened_sample(hidden, prepare_head(weight), **options)


PROVIDER = Provider(
    name="flash_sampling_screened",
    label="FlashSampling, screened head",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=replace(FULL_CONTRACT, noise="token", entropy=False, rank=False, top=False),
    build=ScreenedLaunch,
    build_sharded=build_sharded,
    sample=sample,
    accept=accept,
    call="screened_sample",
    kept_bytes=kept_bytes,
    supports=unsupported_reason,
    tuning=tuning("screened"),
)
