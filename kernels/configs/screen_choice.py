"""Choose the tile shapes of the screened sampler, and the calls that use the screen."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsbench.kernels.configs import choice
from fsbench.kernels.configs.gpu import is_hopper
from fsbench.kernels.configs.hopper import ROWS
from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig
from fsbench.kernels.configs.tables import find


@cache
def _screen_config(B: int, D: int, device: torch.device) -> ScreenConfig | HopperScreenConfig:
    """Look up the screen's tile shapes in the tables."""
    name = torch.cuda.get_device_properties(device).name
    config: Any = find("screened", B, D, name, torch.cuda.get_device_capability(device))
    return config


def portable_config(B: int, D: int, device: torch.device) -> ScreenConfig:
    """Return tile shapes of the portable screen, for calls that the Hopper screen does not take."""
    config = _screen_config(B, D, device)
    return config if isinstance(config, ScreenConfig) else find("screened", B, D, "")


def default_configs(
    B: int, D: int, device: torch.device
) -> tuple[ScreenConfig | HopperScreenConfig, ResolveConfig]:
    """Return the tile shapes of screen and exact computation for B rows of D columns."""
    if device.type == "cpu":  # the interpreter: small, so that tests reach every limit
        return (
            ScreenConfig(16, 128, 64, 64, False, False, 4, 1, 1, room=4, row_room=64),
            ResolveConfig(16, 64, 16, 128, 64, num_stages=1, ctas_per_sm=1, led_from=0),
        )
    return _screen_config(B, D, device), resolve_config(B, D)


@cache
def resolve_config(B: int, D: int) -> ResolveConfig:
    """Return tile shapes of the exact computation on a GPU; no table has them."""
    rows = min(64, max(16, 1 << (B - 1).bit_length()))
    # A stage has hidden from each block of 256 columns on: with more blocks, fewer columns fit.
    step = 128 if D <= 8192 else 64 if D <= 16_384 else 32 if D <= 65_536 else 16
    stages, ctas = (4, 2) if B <= 8 else (5, 1)
    # With shorter lists the form by warps takes nearly as long for many candidates as for few. For
    # normal:3 at D = 4096 the other form without them is faster from 17 to 32 rows (H100, H200); at
    # 64 rows by 3 us on an H200, where it takes 17 us more for normal:8 and greedy decoding. At
    # D = 8192 it is slower: 69 to 220 us in place of 27 to 62 (H100).
    by_warps = B <= 16 or B > 32 or D > 4096
    tile = (rows, 64, 64 if rows < 64 else 32)
    return ResolveConfig(64, step, *tile, 4, stages, ctas, by_warps, 16 if by_warps else None)


def filter_configs(B: int, D: int, device: torch.device) -> tuple[ScreenConfig, ResolveConfig]:
    """Return the tile shapes for filters from the screen, which only the portable screen has."""
    screen, resolve = default_configs(B, D, device)
    if not isinstance(screen, ScreenConfig):
        screen = portable_config(B, D, device)
    return screen, replace(resolve, by_warps=B <= FEW_FILTERED_ROWS)


FEW_FILTERED_ROWS = 4
"""Most rows with filters whose candidates are computed by warps, which is slower for many: at 16
rows 23 in place of 18 us (D = 4096) and 123 in place of 91 (D = 8192), but 13 in place of 17 at 4
rows (D = 4096) and 23 in place of 34 at one row (D = 8192; H200, a trial of both)."""
FILTERED_ROWS = 32
"""Most rows with filters from the screen: at 64 rows the weight is faster."""
FILTERED_K = 64
"""Largest k with filters from the screen; see screened.filter_kernels."""


def worth_filtering(
    B: int,
    V: int,
    top_k: int | Tensor,
    device: torch.device,
    runs: bool = True,
) -> tuple[bool, str]:
    """Return whether filters are from the screen, and the reason.

    Args:
        top_k: Argument of truncated_sample.
        runs: Whether kernels run on this device; filters from the screen have no other form.
    """
    if not runs or (device.type == "cuda" and not is_hopper(device)):
        return False, "the screen has filters on GPUs of compute capability 9.0 alone"
    if isinstance(top_k, int) and not 0 < top_k <= min(FILTERED_K, V - 1):
        return False, f"top_k = {top_k} is off or above {FILTERED_K}"
    chosen = B <= FILTERED_ROWS
    return chosen, f"B = {B} is {'at most' if chosen else 'above'} {FILTERED_ROWS}"


SCREENED_ROWS = 128
"""Most rows for which the screen is chosen on an H200, or for D above 6144 on any GPU.

The alternative is the weight's kernel with token noise, since a head draws with no other. At 129 to
192 rows it takes as long as the screen on an H200, within 2 %; on an H100 such heads were timed up
to 128 rows, where the screen takes 0.72 of its time."""
SCREENED_ROWS_H100 = 256
"""The same for D up to 6144 on an H100: 0.96 of its time at 256 rows."""
SCREENED_AGAIN = range(257, 321)
"""Rows for which it is chosen on an H200, too: 0.79 to 0.94 of the time of the faster kernel, since
the screen computes 384 rows for them, the portable kernel 512."""
FEW_BYTES, FEW_ROWS = 400_000_000, 8
"""Heads with fewer bytes take the screen up to FEW_ROWS rows: its fixed cost is large for them."""


def worth_screening(
    B: int, V: int, D: int, device: torch.device, all_greedy: bool = False
) -> tuple[bool, str]:
    """Return whether the screen was measured to be faster than the weight, and the reason.

    Args:
        all_greedy: Whether no row needs noise, so that the weight's kernel is as fast as with group
            noise.
    """
    if not is_hopper(device):
        return False, "the screen was measured on GPUs of compute capability 9.0 alone"
    h100 = choice.portable_rows(device) > ROWS
    most = SCREENED_ROWS_H100 if h100 and D <= 6144 and not all_greedy else SCREENED_ROWS
    heads = f"D = {D}"
    if 2 * V * D < FEW_BYTES and most > FEW_ROWS:
        most, heads = FEW_ROWS, f"heads below {FEW_BYTES // 10**6} MB"
    elif not h100 and not all_greedy and B in SCREENED_AGAIN:
        return True, f"B = {B} is between {SCREENED_AGAIN[0]} and {SCREENED_AGAIN[-1]}, for {heads}"
    chosen = most >= B
    return chosen, f"B = {B} is {'at most' if chosen else 'above'} {most}, for {heads}"
