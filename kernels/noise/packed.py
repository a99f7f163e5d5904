"""Packed candidates in torch: (score, token) as one int64, for what runs without a kernel."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(scores: Tensor, tokens: Tensor) -> Tensor:
    """As keys.ordered_key: scores, rounded to fp32, and their tokens -> int64."""
    bits = (scores.float() + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.long() << 32) | (0x7FFFFFFF - tokens.clamp_min(0))


def unpack(keys: Tensor) -> Tensor:
    """As keys.token_of_key: the tokens; -1 where the score is not finite."""
    ordered = keys >> 32
    finite = (ordered < 0x7F800000) & (ordered > -0x7F800001)
    return torch.where(finite, 0x7FFFFFFF - (keys & 0x7FFFFFFF), -1)
