"""Cases for `fsbench run`: flash_sample with log-probabilities, by kernel and Hopper tile shape.

    fsbench run --provider-path tools/cases/logprob_tiles.py --provider logprob_g3v128 \
        --provider logprob_g2v128 --provider matmul_only --batch 129,160,192,256 --out OUT

The sums that log-probabilities need are computed in the epilogue, so the fastest tiles of a plain
call are not the fastest here (TILES_WITH_SUMS in kernels/configs/choice.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fsbench.kernels import flash_sample
from fsbench.kernels.configs.hopper import ROWS, HopperConfig
from fsbench.kernels.flash_sampling_hopper import PROVIDER as HOPPER
from fsbench.kernels.providing.launches import CallLaunch, variant
from fsbench.problem import Problem
from fsbench.provider import Launch

OPTIONS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "portable": {"kernel": "portable"},
    "hopper": {"kernel": "hopper"},
    "g3v128": {"config": HopperConfig(3, 128, 64, 5, False)},
    "g2v128": {"config": HopperConfig(2, 128, 64, 7, False)},
    "g2v256": {"config": HopperConfig(2, 256, 64, 4, True)},
}


def build(problem: Problem, weight: Any, options: dict[str, Any]) -> Launch:
    return CallLaunch(flash_sample, problem, weight, return_logprob=True, **options)


def unsupported_reason(problem: Problem, options: dict[str, Any]) -> str | None:
    config = options.get("config")
    if config and config.warpgroups == 3 and not 2 * ROWS < problem.B <= 3 * ROWS:
        return f"three warpgroups are for {2 * ROWS + 1} to {3 * ROWS} rows, not {problem.B}"
    return HOPPER.supports(problem)


PROVIDERS = tuple(
    variant(
        HOPPER,
        f"logprob_{name}",
        f"flash_sample with log-probabilities, {name}",
        partial(build, options=options),
        partial(unsupported_reason, options=options),
    )
    for name, options in OPTIONS.items()
)
