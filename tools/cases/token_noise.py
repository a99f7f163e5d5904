"""Cases for `fsbench run`: both kernels with a Gumbel for each token.

    fsbench run --provider-path tools/cases/token_noise.py --provider token_portable \
        --provider token_hopper --provider matmul_only --d 4096 --v 151936 --batch 64,144 --out OUT

Speculation and screened heads draw with this noise.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fsbench.kernels.flash_sampling_hopper import PROVIDER as HOPPER
from fsbench.kernels.flash_sampling_token import PROVIDER as TOKEN
from fsbench.kernels.providing.launches import FlashSampling, variant
from fsbench.problem import Problem
from fsbench.provider import Launch


def build(problem: Problem, weight: Any, kernel: str) -> Launch:
    return FlashSampling(problem, weight, noise="token", kernel=kernel)


PROVIDERS = tuple(
    variant(
        TOKEN,
        f"token_{kernel}",
        f"{kernel} kernel, token noise",
        partial(build, kernel=kernel),
        HOPPER.supports,
    )
    for kernel in ("portable", "hopper")
)
