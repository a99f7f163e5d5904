"""Cases for `fsbench run`: both kernels with a Gumbel for each token, and without absent rows.

    fsbench run --provider-path tools/cases/token_noise.py --provider token_portable \
        --provider token_hopper --provider matmul_only --d 4096 --v 151936 --batch 64,144 --out OUT

Speculation and screened heads draw with this noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from fsbench.kernels.configs import portable
from fsbench.kernels.flash_sampling_hopper import PROVIDER as HOPPER
from fsbench.kernels.flash_sampling_token import PROVIDER as TOKEN
from fsbench.kernels.providing.launches import FlashSampling, empty_hidden, variant
from fsbench.problem import Problem
from fsbench.provider import Launch, Provider


class Padded(FlashSampling):
    """The portable kernel on hidden states with rows of zeros up to the rows of its tile."""

    def __init__(self, problem: Problem, weight: Any):
        rows = portable.bucket(problem.B)
        whole = replace(problem, B=-(-problem.B // rows) * rows)
        super().__init__(whole, weight, noise="token", kernel="portable")
        self._rows = empty_hidden(whole, weight.device).zero_()

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        self._rows[: len(hidden)] = hidden
        return super().__call__(self._rows, seed, offset)[: len(hidden)]


CASES: dict[str, tuple[Callable[..., Launch], Provider]] = {
    "portable": (partial(FlashSampling, noise="token", kernel="portable"), TOKEN),
    "hopper": (partial(FlashSampling, noise="token", kernel="hopper"), HOPPER),
    "padded": (Padded, TOKEN),
}
PROVIDERS = tuple(
    variant(TOKEN, f"token_{name}", f"{name}, token noise", build, like.supports)
    for name, (build, like) in CASES.items()
)
