"""Tile shapes of the screened sampler's two launches, and the tuning space of the first.

The choice is that of configs.tables, by GPU, bucket of B and D; configs.screen_choice makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fsbench.kernels.configs.portable import bucket, check_options

LARGEST_CODE = 127
LARGEST_D = 131_072
"""Sums of D products of two bytes are below 2^31: 127 * 128 * 131,072 < 2^31."""
_SHARED = 225 * 1024  # 227 KiB less the barriers


@dataclass(frozen=True)
class ScreenConfig:
    """Tile shapes of the portable screen.

    Attributes:
        block_b, block_v, block_d: Rows, tokens and columns of a tile; block_b is a multiple of 8.
        slice: Tokens whose noise is in registers at once; 16 of a row are one word of four tokens
            for each of four threads.
        v_on_m: Whether the vocabulary is on the M side of the instruction, else the rows (two for
            each: their high and low bytes).
        flatten: Whether loads of the next tile start during the epilogue of this one.
        num_warps, num_stages: As in Triton.
        ctas_per_sm: Persistent programs per multiprocessor.
        room: Records, each a word of four tokens, that a program can keep of every slice / 4-th
            word of a draw. A draw that needs more is computed in full.
        row_room: Tokens of a draw that may remain at the end; more are computed in full, too.
        ahead: KiB of its share of the copy that a program prefetches before hidden is rounded; a
            power of two.
    """

    block_b: int
    block_v: int
    block_d: int
    slice: int
    v_on_m: bool
    flatten: bool
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    room: int = 16
    row_room: int = 4096
    ahead: int = 128

    def __post_init__(self) -> None:
        check_options(
            self,
            block_b=(8, 16, 32, 64),
            block_v=(128, 256, 512),
            block_d=(32, 64, 128, 256),
            slice=(16, 32, 64, 128),
            num_warps=(1, 2, 4, 8),
            num_stages=range(1, 17),
            ctas_per_sm=range(1, 5),
        )

    def __str__(self) -> str:
        return f"portable-b{self.block_b}v{self.block_v}d{self.block_d}p{self.num_stages}"

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the load pipeline in bytes; a column of hidden has two bytes."""
        return (self.block_v + 2 * self.block_b) * self.block_d * self.num_stages

    @property
    def slots(self) -> int:
        """Words of a row in a slice."""
        return self.slice // 4

    @property
    def depth(self) -> int:
        """Records of each slot that are read together at the end: 16 for every thread."""
        return max(1, min(self.room, 512 * self.num_warps // (self.block_b * self.slots)))


@dataclass(frozen=True)
class HopperScreenConfig:
    """Tile shapes of the screen for Hopper (screened.hopper).

    Attributes:
        block_b: Rows of a program, 32 for each warpgroup.
        split: Warpgroups with the same rows: 1, or 2 with 64 of each 128 tokens.
        block_v, block_d: Tokens and columns of a tile.
        num_stages: Stages of the ring.
        room, row_room: As in ScreenConfig.
    """

    block_b: int
    split: int
    block_v: int
    block_d: int
    num_stages: int
    room: int = 16
    row_room: int = 4096

    def __post_init__(self) -> None:
        check_options(
            self,
            block_b=(32, 64, 128),
            split=(1, 2),
            block_v=(128, 256),
            block_d=(128, 256),
            num_stages=range(2, 17),
        )

    def __str__(self) -> str:
        return (
            f"hopper-b{self.block_b}s{self.split}v{self.block_v}d{self.block_d}p{self.num_stages}"
        )

    @property
    def num_warps(self) -> int:
        """Warps that compute, without the loading warp."""
        return self.block_b // 8 * self.split

    @property
    def slots(self) -> int:
        """Words of a row in a slice."""
        return 16 * self.split

    @property
    def ctas_per_sm(self) -> int:
        """Persistent programs per multiprocessor."""
        return 1


@dataclass(frozen=True)
class ResolveConfig:
    """Tile shapes of the exact computation.

    Attributes:
        at_once: Most tokens that are computed together; 64 for the instruction of the fused kernels
            on Hopper.
        step: Columns at a time; a power of two that divides 256.
        block_b, block_v, block_d: Tile of rows that are computed in full; block_v is also their
            slice.
        num_warps, num_stages, ctas_per_sm: As in ScreenConfig.
        by_warps: Whether every warp has eight tokens in place of at_once (screened.exact_logits),
            on Hopper, if TMA can load the weight and D is a multiple of 256.
        led_from: MiB that the listed tokens have in the weight, from which the lists are shortened
            first (screened.leaders); None for never.
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
    led_from: int | None = 16


BUCKETS = (2, 8, 16, 32, 64, 128)
"""Upper ends of the buckets of B; a larger B uses the last bucket's config."""


def space(B: int, shared_limit: int = _SHARED) -> list[ScreenConfig]:
    """Return the tuning space of the portable screen for one bucket of B.

    Args:
        shared_limit: Bytes of shared memory of a multiprocessor.
    """
    upper = min(64, max(8, bucket(B, BUCKETS)))
    forms: list[tuple[int, tuple[int, ...], int, bool, bool, tuple[int, ...]]]
    if upper <= 16:  # few rows do not fill the M side, so the vocabulary is there
        forms = [(128, (128, 256), 128, True, True, (4, 8))]
    else:
        forms = [(128, (128, 256), 32, False, False, (4, 8)), (256, (128,), 64, False, False, (8,))]
    configs = []
    for block_v, columns, width, v_on_m, flatten, warps in forms:
        for block_d, num_warps, stages, ctas in product(columns, warps, (3, 4, 5, 6), (1, 2)):
            config = ScreenConfig(
                upper, block_v, block_d, width, v_on_m, flatten, num_warps, stages, ctas
            )
            if config.shared_bytes * ctas <= shared_limit:
                configs.append(config)
    return configs


def hopper_space(B: int) -> list[HopperScreenConfig]:
    """Return the tuning space of the screen for Hopper: all stages that fit, and one less."""
    upper = bucket(B, BUCKETS)
    rows = [(32, 1), (32, 2)] if upper <= 32 else [(64, 1), (upper, 1)]
    configs = []
    for (block_b, split), block_v, block_d in product(dict.fromkeys(rows), (128, 256), (128, 256)):
        most = _SHARED // ((block_v + 2 * block_b) * block_d)
        for stages in (most, most - 1):
            if stages >= 2:
                configs.append(HopperScreenConfig(block_b, split, block_v, block_d, stages))
    return configs


def extra_bytes(V: int, D: int) -> int:
    """Return the bytes of the int8 copy of a weight [V, D], with its bounds."""
    return V * (D + 12)
