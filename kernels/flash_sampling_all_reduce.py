"""FlashSampling on each rank, then one all-reduce of packed candidates: works across nodes.

The kernel of flash_sample leaves every rank's best candidate of each row packed into an int64 whose
order is that of the candidates: score first, then the lower token id. The maximum over ranks, a
plain collective (NCCL), is the winner. It needs no memory that the ranks map, so it works where
symmetric memory does not, for two more launches: the collective and the decoding of the keys.

On one GPU it is flash_sampling with the decoding in a second launch.
"""

from __future__ import annotations

from functools import partial

from fsbench.kernels.providing.launches import (
    CANDIDATES_ONLY,
    MergedLater,
    decode,
    noise_map,
    vocab_shard,
)
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Shard, Tensor


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    import torch.distributed as dist

    def merge(keys: Tensor) -> Tensor:
        dist.all_reduce(keys, dist.ReduceOp.MAX, shard.group)
        return decode(keys)

    return MergedLater(problem, vocab_shard(shard), merge)


PROVIDER = Provider(
    name="flash_sampling_all_reduce",
    label="FlashSampling + all-reduce",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=CANDIDATES_ONLY,
    build=partial(MergedLater, merge=decode),
    build_sharded=build_sharded,
    presets=("tp",),
)
