"""`exponential_race` with an autotuned matmul: torch.compile's max-autotune.

Inductor times cuBLAS's choice and its Triton matmuls, and the tiles of the kernels after
it, on the shapes of the problem, and keeps the fastest; with Triton the cast and the division may
be fused into the matmul. It times them with a warm L2 cache, outside of the step. A build without a
cache takes minutes, so no preset has it: `--provider exponential_race_tuned`.

Noise, its tail and undefined rows: as `exponential_race`.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.compiled import build_race
from fsbench.baselines.providing.logits import STORED
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    return build_race(problem, weight, mode="max-autotune-no-cudagraphs")


PROVIDER = Provider(
    name="exponential_race_tuned",
    label="Exponential race, autotuned",
    kind=Kind.EXACT,
    build=build,
    tunes=True,
    capabilities=replace(STORED, devices=("cuda",), exact_to_gap=11.0),
)
