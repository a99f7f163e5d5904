"""Lower bound: the matmul alone. No sampler that stores logits can be faster.

Every unfused baseline starts with this call, so the difference to this bound is its cost of
sampling. The output is allocated as in a decode step: a preallocated `out=` buffer would run the
same kernel in the same time, but the bound would not report the memory of the logits, which fusing
removes.

A fused sampler may be faster: it skips the store of the logits, 2 * B * V bytes in bf16.
"""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.logits import STORED, matmul_logits
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Shard, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    V, weight = len(weight), padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        """Return the logits [B, V], not tokens."""
        return matmul_logits(hidden, weight, V)

    return launch


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    """Multiply by the rank's rows; ranks exchange nothing."""
    return build(problem, shard.weight)


PROVIDER = Provider(
    name="matmul_only",
    label="Matmul only",
    kind=Kind.LOWER_BOUND,
    build=build,
    build_sharded=build_sharded,
    capabilities=replace(STORED, zero_temperature=True),
    presets=("paper", "quick", "smoke", "cpu", "lean", "tp", "truncated", "score"),
)
