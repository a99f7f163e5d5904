"""FlashSampling with token noise: one Gumbel for every token, as the paper's Algorithm 1.

Its stage 2 is not a launch: programs merge their candidates by an atomic maximum. The kernel is
that of flash_sampling; the difference in time is what group noise saves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsbench.kernels.providing.launches import (
    FULL_CONTRACT,
    FlashSampling,
    accept,
    flash_sample,
    matmul_form,
    noise_map,
)
from fsbench.kernels.providing.tuning import tuning
from fsbench.provider import Kind, Provider

PROVIDER = Provider(
    name="flash_sampling_token",
    label="FlashSampling, token noise",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=replace(FULL_CONTRACT, noise="token"),
    build=partial(FlashSampling, noise="token"),
    sample=partial(flash_sample, noise="token"),
    accept=accept,
    presets=("lean",),
    tuning=tuning("portable-token"),
    matmul_form=partial(matmul_form, noise="token"),
)
