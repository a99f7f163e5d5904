"""Lower bound: the logits and nothing else. No sampler that stores logits can be faster.

The call is the one that every unfused baseline starts with, output allocated as in a decode step,
so a baseline minus this bound is its cost of sampling. A preallocated `out=` buffer was considered
and rejected: the kernel is the same (torch's caching allocator costs the GPU nothing, and under a
CUDA graph the address is fixed anyway), but the bound would no longer report the logits' memory,
which is part of what fusing removes.

A fused sampler may be faster: it skips the store of the logits, 2 * B * V bytes in bf16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.logits import matmul_logits
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Shard, padded

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    V, weight = len(weight), padded(weight)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        """Returns the logits [B, V], not tokens."""
        return matmul_logits(hidden, weight, V)

    return launch


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    """The rank's own rows, and nothing crosses the ranks."""
    return build(problem, shard.weight)


PROVIDER = Provider(
    name="matmul_only",
    label="Matmul only",
    kind=Kind.LOWER_BOUND,
    build=build,
    build_sharded=build_sharded,
    capabilities=Capabilities(
        devices=("cuda", "cpu"),
        dtypes=("bf16", "fp16", "fp32"),
        zero_temperature=True,
        host_sync_free=True,
    ),
    presets=("paper", "quick", "smoke", "cpu", "lean", "tp", "truncated", "score"),
)
