"""Tile shapes of the screened sampler's two launches, and the tuning space of the first.

The choice is that of configs.tables, by GPU, bucket of B and D; configs.screen_choice makes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fsbench.kernels.configs.options import check_options
from fsbench.kernels.configs.portable import bucket

LARGEST_CODE = 127
LARGEST_D = 131_072
"""Sums of D products of two bytes are below 2^31: 127 * 128 * 131,072 < 2^31."""
_SHARED = 225 * 1024  # 227 KiB less the barriers


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
        """Shared memory of the load pipeline of a program; hidden has two bytes a column."""
        return (self.block_v + 2 * self.block_b) * self.block_d * self.num_stages

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

    block_b: rows of a program, 32 for each warpgroup: 32, 64 or 128. split: how many warpgroups
        have the same rows, 1, or 2 with half of a tile's tokens each.
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
        eight of the tokens in place of at_once (screened.exact_logits).
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


BUCKETS = (2, 8, 16, 32, 64, 128)
"""Upper ends of the buckets of B; a larger B uses the last bucket's config."""


def space(B: int, shared_limit: int = _SHARED) -> list[ScreenConfig]:
    """The tuning space of the portable screen for one bucket of B.

    shared_limit: bytes of shared memory of a multiprocessor.
    """
    upper = min(64, max(8, bucket(B, BUCKETS)))
    forms: list[tuple[int, tuple[int, ...], int, bool, bool, tuple[int, ...]]]
    if upper <= 16:  # the vocabulary on the M side of the instruction: few rows fill no N side
        forms = [(128, (128, 256), 128, True, True, (4, 8))]
    else:
        forms = [(128, (128, 256), 32, False, False, (4, 8)), (256, (128,), 64, False, False, (8,))]
    found = []
    for block_v, columns, width, v_on_m, flatten, warps in forms:
        for block_d, num_warps, stages, ctas in product(columns, warps, (3, 4, 5, 6), (1, 2)):
            config = ScreenConfig(
                upper, block_v, block_d, width, v_on_m, flatten, num_warps, stages, ctas
            )
            if config.shared_bytes * ctas <= shared_limit:
                found.append(config)
    return found


def hopper_space(B: int) -> list[HopperScreenConfig]:
    """The tuning space of the screen for Hopper: as many stages as fit, and one less."""
    upper = bucket(B, BUCKETS)
    rows = [(32, 1), (32, 2)] if upper <= 32 else [(64, 1), (upper, 1)]
    found = []
    for (block_b, split), block_v, block_d in product(dict.fromkeys(rows), (128, 256), (128, 256)):
        most = _SHARED // ((block_v + 2 * block_b) * block_d)
        for stages in (most, most - 1):
            if stages >= 2:
                found.append(HopperScreenConfig(block_b, split, block_v, block_d, stages))
    return found


def extra_bytes(V: int, D: int) -> int:
    """Return the bytes of the int8 copy of a weight [V, D], with its bounds."""
    return V * (D + 12)
