"""Problems on the GPU that the tests there share."""

from __future__ import annotations

import torch
from torch import Tensor


def counter(*values: int) -> Tensor:
    """A seed or an offset."""
    return torch.tensor(values, dtype=torch.int64, device="cuda")


def problem(
    B: int, V: int, D: int, dtype: torch.dtype = torch.bfloat16, sigma: float = 2.0
) -> tuple[Tensor, Tensor]:
    """hidden and weight whose logits have a standard deviation of about sigma."""
    generator = torch.Generator("cuda").manual_seed(B + V + D)
    hidden = torch.randn(B, D, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(V, D, generator=generator, device="cuda") * (sigma / D**0.5)
    return hidden, weight.to(dtype)
