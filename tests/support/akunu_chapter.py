"""akunu's sampler as its chapter describes it, in plain torch: what it keeps, and what it draws.

The oracle of `akunu_faithful_kernel`, in the same order of operations; sums in float64. Without
top-k the text gives the bisection of top-p no lower end: it is 30 below the largest logit here.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPAN = 30.0


def kept(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Which tokens of logits [B, V] (read as fp16) are kept: bool [B, V]. The filters are at T = 1.

    The thresholds are fp32, as the kernel's.
    """
    y = logits.half().float()
    top = y.amax(1, keepdim=True)
    threshold = torch.full_like(top, -torch.inf)
    if top_k > 0:
        low, high = top - SPAN, top
        for _ in range(12):
            middle = (low + high) * 0.5
            too_many = (y > middle).sum(1, keepdim=True) > top_k
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        threshold = high
    if 0 < top_p < 1:
        mass = torch.exp((y - top).double())
        target = top_p * (mass * (y >= threshold)).sum(1, keepdim=True)
        low, high = torch.maximum(threshold, top - SPAN), top
        for _ in range(8):
            middle = (low + high) * 0.5
            too_many = (mass * (y >= middle)).sum(1, keepdim=True) > target
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        threshold = torch.maximum(threshold, high)
    if 0 < min_p < 1:
        threshold = torch.maximum(threshold, top + torch.tensor(min_p).log())
    return y >= threshold


def uniforms(seed: int, position: int, rows: int, V: int) -> Tensor:
    """u of every token before it is cut to [1e-7, 1 - 1e-7]: float64 [rows, V], multiples of 2^-32.

    Row 0 is the chapter's; each other row has another seed, as in the kernel.
    """
    mask = 0xFFFFFFFF
    row = torch.arange(rows)[:, None]
    state = (position + seed + row * 0x9E3779B9) & mask
    state = ((state * 2654435761) & mask) + torch.arange(V)
    state = (state * 747796405 + 2891336453) & mask
    word = (((state >> ((state >> 28) + 4)) ^ state) * 277803737) & mask
    return ((word >> 22) ^ word).double() / 2**32


def scores(logits: Tensor, u: Tensor, temperature: float) -> Tensor:
    """logit + T Gumbel in fp16, as stored: [B, V]."""
    cut = u.float().clamp(1e-7, 1 - 1e-7)
    return (logits.half().float() - temperature * torch.log(-torch.log(cut))).half()
