"""Logits that a fused kernel also writes to memory: the buffers and the stores.

For filters a kernel also writes the largest logit of each group of 32 tokens. The groups are those
of the group noise (docs/design/noise.md), so the kernel has computed it anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.noise.arithmetic import halves
from fsbench.kernels.noise.group import largest_member, members

STRIDE_UNIT = 128


class StoredLogits(NamedTuple):
    """Buffers for the logits of a launch.

    Attributes:
        logits: fp32 [B, stride], before the temperature; -inf from token V on. The stride is a
            multiple of 128, so that rows are aligned.
        largest: fp32 [stride / 128, B, 4], the largest logit of each group, NaN if the group has
            one; or None. In this order a tile writes whole lines of memory, not 16 bytes per row.
    """

    logits: Tensor
    largest: Tensor | None


def stride_for(V: int) -> int:
    """Return the stride of rows of V logits."""
    return -(-V // STRIDE_UNIT) * STRIDE_UNIT


def allocate(B: int, V: int, device: torch.device, largest: bool) -> StoredLogits:
    """Allocate buffers for the logits of B rows, and for the largest of each group if `largest`."""
    stride = stride_for(V)
    dtype = torch.float32
    return StoredLogits(
        torch.empty(B, stride, dtype=dtype, device=device),
        torch.empty(stride // 128, B, 4, dtype=dtype, device=device) if largest else None,
    )


def largest_of_groups(logits: Tensor) -> Tensor:
    """Compute `StoredLogits.largest` of logits [B, stride] in torch."""
    return logits.view(len(logits), -1, 16, 4, 2).amax((2, 4)).transpose(0, 1).contiguous()


@triton.jit
def store_logits(logits_ptr, logits, rows, v0, B, stride):
    """Store logits [R, WIDTH] from token v0 on, 32 columns at a time to save shared memory.

    The next launch reads them, so they are stored to stay in the L2: without evict_last the stream
    of the weight evicts them first.
    """
    WIDTH: tl.constexpr = logits.shape[1]
    if WIDTH > 32:
        low, high = halves(logits)
        store_logits(logits_ptr, low, rows, v0, B, stride)
        store_logits(logits_ptr, high, rows, v0 + WIDTH // 2, B, stride)
    else:
        column = v0 + tl.arange(0, WIDTH)
        pointers = logits_ptr + rows.to(tl.int64)[:, None] * stride + column[None, :]
        mask = (rows < B)[:, None] & (column < stride)[None, :]
        tl.store(pointers, logits, mask=mask, eviction_policy="evict_last")


@triton.jit
def place_of_largest(group, row, B):
    """Return the int64 index of a group's largest logit in `StoredLogits.largest`."""
    return ((group // 4).to(tl.int64) * B + row) * 4 + group % 4


@triton.jit
def store_largest(largest_ptr, logits, rows, v0, B, stride):
    """Store the largest of each group of logits [R, WIDTH]; WIDTH is a multiple of 128."""
    group = v0 // 32 + tl.arange(0, logits.shape[1] // 32)
    pointers = largest_ptr + place_of_largest(group[None, :], rows[:, None], B)
    mask = (rows < B)[:, None] & (group < stride // 32)[None, :]
    tl.store(pointers, largest_member(members(logits)), mask=mask, eviction_policy="evict_last")
