"""FlashSampling with token noise: Algorithm 1 to the letter, one Gumbel for every token.

The same kernel as flash_sampling; the difference between the two is what group noise saves.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fsbench.kernels.providing.launches import FULL_CONTRACT, FlashSampling, flash_sample, noise_map
from fsbench.kernels.providing.tuning import tuning
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    """See Provider."""
    return FlashSampling(problem, weight, "token")


def matmul_form(problem: Problem, weight: Tensor) -> Launch:
    """See Provider."""
    from fsbench.kernels.providing.matmul_form import build_matmul_form

    return build_matmul_form(problem, weight, noise="token")


PROVIDER = Provider(
    name="flash_sampling_token",
    label="FlashSampling, token noise",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=replace(FULL_CONTRACT, noise="token"),
    build=build,
    sample=partial(flash_sample, noise="token"),
    presets=("lean",),
    tuning=tuning("portable-token"),
    matmul_form=matmul_form,
)
