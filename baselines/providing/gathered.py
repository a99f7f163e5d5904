"""Logits of a sharded LM head, brought together on every rank: what serving engines do.

    rank k has logits [B, V_k]  ->  all ranks have [B, V]

One all-gather, in which every rank receives (n - 1) / n of 2 B V bytes in bf16, and one pass that
puts the ranks' columns side by side, which a compiler may fuse into what follows.

The functional collectives of torch.distributed gather along a
dimension other than 0 through a helper that torch.compile refuses under fullgraph (torch 2.11,
pytorch issue 179722). The operators below them, with the permutation written out, do compile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fsbench.provider import Shard

if TYPE_CHECKING:
    from torch import Tensor

Gather = Callable[["Tensor"], "Tensor"]


def gathering(shard: Shard) -> Gather:
    """A function for eager or compiled code: local logits [B, V_rank] -> [B, V] on every rank.

    Shards that are smaller than the largest are padded for the collective.
    """
    import torch
    import torch.distributed._functional_collectives

    sizes, name = list(shard.sizes), shard.group.group_name
    ranks, widest = len(sizes), max(sizes)

    def gather(logits: Tensor) -> Tensor:
        B = logits.shape[0]
        padded = torch.nn.functional.pad(logits, (0, widest - logits.shape[1])).contiguous()
        stacked = torch.ops._c10d_functional.all_gather_into_tensor(padded, ranks, name)
        stacked = torch.ops._c10d_functional.wait_tensor(stacked).view(ranks, B, widest)
        if min(sizes) == widest:
            return stacked.permute(1, 0, 2).reshape(B, ranks * widest)
        return torch.cat([part[:, :size] for part, size in zip(stacked, sizes, strict=True)], 1)

    return gather
