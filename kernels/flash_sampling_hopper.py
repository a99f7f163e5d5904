"""FlashSampling for Hopper: TMA, wgmma and warp specialization, in Gluon (docs/design/kernels.md).

flash_sample runs it on a GPU of compute capability 9.0 where it is the faster of its two kernels.
Logits and tokens are those of flash_sampling, bit for bit.
"""

from __future__ import annotations

from functools import partial

from fsbench.kernels.providing.launches import (
    FULL_CONTRACT,
    FlashSampling,
    accept,
    build_sharded,
    flash_sample,
    noise_map,
)
from fsbench.kernels.providing.tuning import tuning
from fsbench.problem import Problem
from fsbench.provider import Kind, Provider


def supports(problem: Problem) -> str | None:
    if problem.D % 8:
        return "needs rows of a multiple of 16 bytes (D a multiple of 8)"
    return None


PROVIDER = Provider(
    name="flash_sampling_hopper",
    label="FlashSampling (Hopper)",
    kind=Kind.EXACT,
    requires=("triton",),
    compute_capability=(9, 0),
    noise_map=noise_map,
    capabilities=FULL_CONTRACT,
    supports=supports,
    build=partial(FlashSampling, kernel="hopper"),
    build_sharded=partial(build_sharded, kernel="hopper"),
    sample=partial(flash_sample, kernel="hopper"),
    accept=accept,
    call="flash_sample",
    presets=("paper", "quick", "lean", "tp"),
    tuning=tuning("hopper"),
)
