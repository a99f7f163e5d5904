"""Problems that the tests of filters from a screened head share."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fsbench.kernels.configs.screen import ResolveConfig, ScreenConfig
from fsbench.kernels.configs.screen_choice import filter_configs


def matrices(B: int, D: int, V: int, rows: int = 0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Hidden and a weight of `rows` rows whose sums are exact in fp32, in any order."""
    draw = torch.Generator().manual_seed(B + D + V + seed)
    hidden = (4 * torch.randn(B, D, generator=draw)).round() / 8
    return hidden, (8 * torch.randn(rows or V, D, generator=draw)).round() / 16


def roomy(B: int, D: int, device: torch.device) -> tuple[ScreenConfig, ResolveConfig]:
    """Lists as long as on a GPU; else they have 64 places, and tests meet the end of them."""
    screen, exact = filter_configs(B, D, device)
    return replace(screen, row_room=4096), exact
