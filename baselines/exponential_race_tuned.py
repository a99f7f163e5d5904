"""`exponential_race` with an autotuned matmul: torch.compile's max-autotune.

Inductor times cuBLAS's choice and its Triton matmuls, and the tiles of the kernels after
it, on the shapes of the problem, and keeps the fastest; with Triton the cast and the division may
be fused into the matmul. It times them with a warm L2 cache, outside of the step. A build without a
cache takes minutes, so no preset has it: `--provider exponential_race_tuned`.

Noise, its tail and undefined rows: as `exponential_race`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.compiled import build_race
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    return build_race(problem, weight, mode="max-autotune-no-cudagraphs")


PROVIDER = Provider(
    name="exponential_race_tuned",
    label="Exponential race, autotuned",
    kind=Kind.EXACT,
    build=build,
    tunes=True,
    capabilities=Capabilities(
        dtypes=("bf16", "fp16", "fp32"),
        host_sync_free=True,
        exact_to_gap=11.0,
    ),
)
