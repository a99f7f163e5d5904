"""FlashSampling for Hopper: TMA, wgmma and warp specialization, in Gluon (docs/design/kernels.md).

flash_sample runs it on a GPU of compute capability 9.0 where it is the faster of its two kernels.
Logits and tokens are those of flash_sampling, bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.kernels.providing.launches import FULL_CONTRACT, flash_sampler
from fsbench.kernels.providing.tuning import tuning
from fsbench.problem import Problem


def supports(problem: Problem) -> str | None:
    if problem.D % 8:
        return "needs rows of a multiple of 16 bytes (D a multiple of 8)"
    return None


PROVIDER = replace(
    flash_sampler("flash_sampling_hopper", "FlashSampling (Hopper)", kernel="hopper"),
    compute_capability=(9, 0),
    capabilities=FULL_CONTRACT,
    supports=supports,
    tuning=tuning("hopper"),
)
