"""`flash_sample` as users call it: kernel="auto", noise="auto" (kernels/configs/choice.py).

flash_sampling and flash_sampling_hopper force one kernel each; this sampler runs the one that
flash_sample chooses, with the tile shapes and split blocks that it chooses. A module named
flash_sample would replace the function in fsbench.kernels once it is imported.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsbench.kernels.providing.launches import (
    FULL_CONTRACT,
    FlashSampling,
    accept,
    build_sharded,
    flash_sample,
    noise_map,
)
from fsbench.problem import QUANTIZED
from fsbench.provider import Kind, Provider

PROVIDER = Provider(
    name="flash_sampling_auto",
    label="flash_sample",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=replace(FULL_CONTRACT, quantized=QUANTIZED),
    build=partial(FlashSampling, kernel="auto"),
    build_sharded=partial(build_sharded, kernel="auto"),
    sample=partial(flash_sample, kernel="auto"),
    accept=accept,
    call="flash_sample",
    presets=("paper", "quick", "lean", "tp"),
)
