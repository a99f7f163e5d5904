"""Tile shapes of the screened sampler's two launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScreenConfig:
    """Tile shapes of the screen.

    block_b, block_v, block_d: rows, tokens and columns of a tile; block_b is a multiple of 8.
    slice: tokens whose noise is in registers at once; 16 of a row are one word of four tokens for
        each of four threads.
    v_on_m: the vocabulary is on the M side of the instruction, else the rows (two for each: their
        high and low bytes).
    flatten: loads of the next tile start under the epilogue of this one.
    num_warps, num_stages: as in Triton. ctas_per_sm: persistent programs per multiprocessor.
    room: records, of a word of four tokens each, that a program can keep of every slice / 4-th word
        of a draw, and row_room: tokens that may be left of it at the end. A draw that needs more is
        computed in full.
    ahead: KiB of its share of the copy that a program asks for before hidden is rounded; a power of
        two.
    """

    block_b: int
    block_v: int
    block_d: int
    slice: int
    v_on_m: bool
    flatten: bool
    num_warps: int
    num_stages: int
    ctas_per_sm: int = 1
    room: int = 16
    row_room: int = 4096
    ahead: int = 128

    def __str__(self) -> str:
        return f"portable-b{self.block_b}v{self.block_v}d{self.block_d}p{self.num_stages}"

    @property
    def slots(self) -> int:
        """Words of a row that a slice has side by side."""
        return self.slice // 4

    @property
    def depth(self) -> int:
        """Records of each slot that are looked at together in the end: 16 for every thread."""
        return max(1, min(self.room, 512 * self.num_warps // (self.block_b * self.slots)))


@dataclass(frozen=True)
class HopperScreenConfig:
    """Tile shapes of the screen for Hopper (screened.hopper).

    block_b: rows of a program, 32 for each warpgroup: 32, 64 or 128. split: as many warpgroups for
        the same rows, 1 or 2, with half of a tile's tokens each; 1 with groups above 8.
    block_v, block_d: tokens, a multiple of 128, and columns, 128 or 256, of a tile.
    num_stages: of the ring. room, row_room: as in ScreenConfig.
    """

    block_b: int
    split: int
    block_v: int
    block_d: int
    num_stages: int
    room: int = 16
    row_room: int = 4096

    def __str__(self) -> str:
        return (
            f"hopper-b{self.block_b}s{self.split}v{self.block_v}d{self.block_d}p{self.num_stages}"
        )

    @property
    def num_warps(self) -> int:
        """Warps that compute."""
        return self.block_b // 8 * self.split

    @property
    def slots(self) -> int:
        """As in ScreenConfig."""
        return 16 * self.split

    @property
    def ctas_per_sm(self) -> int:
        """As in ScreenConfig."""
        return 1


@dataclass(frozen=True)
class ResolveConfig:
    """Tile shapes of the exact computation.

    at_once: tokens that are computed together, at most; 64 for the instruction that the fused
        kernels use on Hopper.
    step: columns at a time; a power of two that divides 256.
    block_b, block_v, block_d: of rows that are computed in full; block_v is also their slice.
    num_warps, num_stages, ctas_per_sm: as in ScreenConfig.
    by_warps: on Hopper, where TMA could load the weight and D is a multiple of 256, every warp has
        eight of the tokens in place of at_once (screened.chain).
    """

    at_once: int
    step: int
    block_b: int
    block_v: int
    block_d: int
    num_warps: int = 4
    num_stages: int = 4
    ctas_per_sm: int = 2
    by_warps: bool = True


def portable_config(B: int) -> ScreenConfig:
    """Of the portable screen, for B rows on a GPU."""
    if B <= 8:
        return ScreenConfig(8, 128, 256, 128, True, True, 4, 5)
    if B <= 16:
        return ScreenConfig(16, 128, 256, 128, True, True, 4, 5)
    if B <= 32:
        return ScreenConfig(32, 128, 128, 32, False, False, 4, 4, 2)
    return ScreenConfig(64, 256, 128, 64, False, False, 8, 4)


def default_configs(
    B: int, D: int, device: torch.device
) -> tuple[ScreenConfig | HopperScreenConfig, ResolveConfig]:
    """Those in use for B rows of D columns on a device."""
    if device.type == "cpu":  # the interpreter: small, so that tests meet every limit
        return (
            ScreenConfig(16, 128, 64, 64, False, False, 4, 1, room=4, row_room=64),
            ResolveConfig(16, 64, 16, 128, 64, num_stages=1, ctas_per_sm=1),
        )
    rows = min(64, max(16, 1 << (B - 1).bit_length()))
    # Its stages also have hidden from every block of 256 columns on: more of them, fewer columns.
    step = 128 if D <= 8192 else 64 if D <= 16_384 else 32 if D <= 65_536 else 16
    stages, ctas = (4, 2) if B <= 8 else (5, 1)
    resolve = ResolveConfig(64, step, rows, 64, 64 if rows < 64 else 32, 4, stages, ctas)
    return _screen_config(B, device), resolve


def filter_configs(B: int, D: int, device: torch.device) -> tuple[ScreenConfig, ResolveConfig]:
    """Those of filters from the screen; there is a portable screen for them only."""
    screen, resolve = default_configs(B, D, device)
    return screen if isinstance(screen, ScreenConfig) else portable_config(B), resolve


FILTERED_ROWS = 32
"""Rows up to which filters are from the screen: at 64 the weight wins (docs/screened-head.md)."""
FILTERED_K = 64
"""The largest k of it; see screened.filtered.candidates."""


def worth_filtering(
    B: int,
    V: int,
    top_k: int | Tensor,
    size: int,
    capability: tuple[int, int] | None,
    runs: bool = True,
) -> tuple[bool, str]:
    """Whether filters are from the screen, and the reason.

    top_k: of truncated_sample. size, capability: as in worth_screening. runs: whether kernels do
    on this device; there is no other form of it.
    """
    if not runs or capability not in ((9, 0), None):
        return False, "the screen has filters on GPUs of compute capability 9.0 alone"
    if isinstance(top_k, int) and not 0 < top_k <= min(FILTERED_K, V - 1):
        return False, f"top_k = {top_k} is off or above {FILTERED_K}"
    if size > 1:
        return False, f"the screen has filters with token noise, not groups of {size}"
    chosen = B <= FILTERED_ROWS
    return chosen, f"B = {B} is {'at most' if chosen else 'above'} {FILTERED_ROWS}"


MEASURED = {1: (64, 32), 4: (64, 32), 8: (32, 16), 16: (16, 8), 32: (8, 4)}
"""By size of the groups: rows up to which the screen is chosen for D <= 6144, and for more.

Those of token noise were measured on an H200 (docs/screened-head.md); they are twice as many where
a GPU's portable_rows are, as an H100's, where 128 rows pay at D = 4096. With groups most of the
time beyond the copy's goes to the rows of the weight that are read, on any GPU. By the times at
D = 4096 (docs/noise.md) these numbers pay, or break even, with twice as many candidates, as
logits of sigma 4 leave them in place of 3; for larger D they are estimates."""
FEW_BYTES, FEW_ROWS = 400_000_000, 8
"""Heads of fewer bytes take the screen up to so many rows: its fixed cost is large there."""


def worth_screening(
    B: int, V: int, D: int, size: int, capability: tuple[int, int] | None, rows: int = 64
) -> tuple[bool, str]:
    """Whether the screen is faster than the fused kernel by what was measured, and the reason.

    size: tokens of a group of the noise. capability: of the GPU, None on a CPU. rows: its
    portable_rows, which grow with its operations per byte.
    """
    if capability != (9, 0):
        return False, "the screen was measured on GPUs of compute capability 9.0 alone"
    most = MEASURED[size][D > 6144] * (rows // 64 if size == 1 else 1)
    what = f"D = {D}, groups of {size}"
    if 2 * V * D < FEW_BYTES and most > FEW_ROWS:
        most, what = FEW_ROWS, f"heads below {FEW_BYTES // 10**6} MB"
    chosen = most >= B
    return chosen, f"B = {B} is {'at most' if chosen else 'above'} {most}, for {what}"


def hopper_config(B: int) -> HopperScreenConfig:
    """Of the screen for Hopper, for B rows."""
    if B <= 32:
        return HopperScreenConfig(32, 2, 128, 256, 4)
    if B <= 64:
        return HopperScreenConfig(64, 1, 128, 256, 3)
    return HopperScreenConfig(128, 1, 128, 128, 4)


def _screen_config(B: int, device: torch.device) -> ScreenConfig | HopperScreenConfig:
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)
    # Measured at B = 1, where the portable screen is as fast, and at 8, where that for Hopper wins.
    return hopper_config(B) if hopper and B > 2 else portable_config(B)
