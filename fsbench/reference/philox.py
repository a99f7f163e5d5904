"""Philox4x32-10, the counter-based generator of all noise (Salmon et al., SC'11)."""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of a * b; b is int64 and holds uint32 values.

    A product of 2^63 or more wraps around. Its 64 bits are those of the unsigned product, and the
    mask removes the copies of the sign bit that the shift brings in.
    """
    product = a * b
    return (product >> 32).bitwise_and_(MASK32), product.bitwise_and_(MASK32)


def philox4x32(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Return four random words of each counter; all are uint32 in int64, broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _mulhilo(0xD2511F53, c0)
        high1, low1 = _mulhilo(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ (c1 ^ k0), low1, high0 ^ (c3 ^ k1), low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def random_words(
    index: Tensor, row: Tensor, offset: Tensor, stream: int, seed: Tensor
) -> tuple[Tensor, ...]:
    """Return the words of counter (index, row, offset, stream) under key `seed`, [B, n] each.

    Args:
        index: int64 [n], words or groups.
        row: int64 [B].
        offset: int64 [1] or [B]; the low 32 bits are used.
        stream: below 2^32.
        seed: int64 [1] or [B].
    """
    key, step = seed.to(index.device).reshape(-1, 1), offset.to(index.device).reshape(-1, 1)
    counter = (index[None, :], row.to(index.device)[:, None], step & MASK32)
    third = torch.tensor(stream, device=index.device)
    words = philox4x32((*counter, third), (key & MASK32, (key >> 32) & MASK32))
    return torch.broadcast_tensors(*words)
