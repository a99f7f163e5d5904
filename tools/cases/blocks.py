"""Cases for `fsbench run`: the Hopper kernel with whole blocks of tokens and with split ones.

    fsbench run --provider-path tools/cases/blocks.py --provider hopper_whole \
        --provider hopper_split --provider matmul_only --d 4096 --v 18992 --batch 1,16 --out OUT

The effect depends on how full the last round of blocks is, so heads and shards of many sizes are
timed (tools/record.toml, split).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.flash_sampling_hopper import PROVIDER as HOPPER
from fsbench.kernels.providing.launches import FlashSampling, variant
from fsbench.problem import Problem
from fsbench.provider import Launch

TILES = (1, 128, 128, 4, False)
"""The default tile shape up to 64 rows."""
MOST_ROWS = 64


def build(problem: Problem, weight: Any, split: bool) -> Launch:
    return FlashSampling(problem, weight, config=HopperConfig(*TILES, split=split))


def unsupported_reason(problem: Problem) -> str | None:
    if problem.B > MOST_ROWS:
        return f"its tiles are for B up to {MOST_ROWS}, not {problem.B}"
    return HOPPER.supports(problem)


PROVIDERS = tuple(
    variant(
        HOPPER,
        f"hopper_{word}",
        f"Hopper kernel, {word} blocks",
        partial(build, split=split),
        unsupported_reason,
    )
    for word, split in (("whole", False), ("split", True))
)
