"""Which tile shapes the screened sampler has, and which calls are drawn by the screen."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig
from fsbench.kernels.configs.tables import find


@cache
def _screen_config(B: int, D: int, device: torch.device) -> ScreenConfig | HopperScreenConfig:
    """Of the tables."""
    name = torch.cuda.get_device_properties(device).name
    found: Any = find("screened", B, D, name, torch.cuda.get_device_capability(device))
    return found


def portable_config(B: int, D: int, device: torch.device) -> ScreenConfig:
    """Of the portable screen on a GPU, for what the one for Hopper does not serve."""
    found = _screen_config(B, D, device)
    return found if isinstance(found, ScreenConfig) else find("screened", B, D, "")


def default_configs(
    B: int, D: int, device: torch.device
) -> tuple[ScreenConfig | HopperScreenConfig, ResolveConfig]:
    """Those in use for B rows of D columns on a device."""
    if device.type == "cpu":  # the interpreter: small, so that tests meet every limit
        return (
            ScreenConfig(16, 128, 64, 64, False, False, 4, 1, 1, room=4, row_room=64),
            ResolveConfig(16, 64, 16, 128, 64, num_stages=1, ctas_per_sm=1),
        )
    return _screen_config(B, D, device), resolve_config(B, D)


def resolve_config(B: int, D: int) -> ResolveConfig:
    """Of the exact computation on a GPU, which no table has."""
    rows = min(64, max(16, 1 << (B - 1).bit_length()))
    # Its stages also have hidden from every block of 256 columns on: more of them, fewer columns.
    step = 128 if D <= 8192 else 64 if D <= 16_384 else 32 if D <= 65_536 else 16
    stages, ctas = (4, 2) if B <= 8 else (5, 1)
    # By warps it takes 12 to 14 us up to 16 rows, in place of 14 to 16; but 17 and 25 at 32 and 64,
    # in place of 15 and 18 (D = 4096, results/h200/screened-d4096-20261125 and -20261123).
    few = B <= 16
    return ResolveConfig(64, step, rows, 64, 64 if rows < 64 else 32, 4, stages, ctas, few)


def filter_configs(B: int, D: int, device: torch.device) -> tuple[ScreenConfig, ResolveConfig]:
    """Those of filters from the screen; there is a portable screen for them only."""
    screen, resolve = default_configs(B, D, device)
    return screen if isinstance(screen, ScreenConfig) else portable_config(B, D, device), resolve


FILTERED_ROWS = 32
"""Rows up to which filters are from the screen: at 64 the weight wins."""
FILTERED_K = 64
"""The largest k of it; see screened.filter_kernels."""


def worth_filtering(
    B: int,
    V: int,
    top_k: int | Tensor,
    capability: tuple[int, int] | None,
    runs: bool = True,
) -> tuple[bool, str]:
    """Whether filters are from the screen, and the reason.

    top_k: of truncated_sample. capability: as in worth_screening. runs: whether kernels do
    on this device; there is no other form of it.
    """
    if not runs or capability not in ((9, 0), None):
        return False, "the screen has filters on GPUs of compute capability 9.0 alone"
    if isinstance(top_k, int) and not 0 < top_k <= min(FILTERED_K, V - 1):
        return False, f"top_k = {top_k} is off or above {FILTERED_K}"
    chosen = B <= FILTERED_ROWS
    return chosen, f"B = {B} is {'at most' if chosen else 'above'} {FILTERED_ROWS}"


SCREENED_ROWS, SCREENED_ROWS_WIDE = 64, 32
"""Rows up to which the screen is chosen for D <= 6144, and for more, as measured on an H200.

Twice as many where a GPU's portable_rows are, as an H100's, where 128 rows pay at D = 4096."""
FEW_BYTES, FEW_ROWS = 400_000_000, 8
"""Heads of fewer bytes take the screen up to so many rows: its fixed cost is large there."""


def worth_screening(
    B: int, V: int, D: int, capability: tuple[int, int] | None, rows: int = 64
) -> tuple[bool, str]:
    """Whether the screen is faster than the fused kernel by what was measured, and the reason.

    capability: of the GPU, None on a CPU. rows: its portable_rows, which grow with its operations
    per byte.
    """
    if capability != (9, 0):
        return False, "the screen was measured on GPUs of compute capability 9.0 alone"
    most = (SCREENED_ROWS_WIDE if D > 6144 else SCREENED_ROWS) * (rows // 64)
    what = f"D = {D}"
    if 2 * V * D < FEW_BYTES and most > FEW_ROWS:
        most, what = FEW_ROWS, f"heads below {FEW_BYTES // 10**6} MB"
    chosen = most >= B
    return chosen, f"B = {B} is {'at most' if chosen else 'above'} {most}, for {what}"
