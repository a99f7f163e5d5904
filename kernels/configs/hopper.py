"""Tile shapes of the Hopper kernel, and the tuning space (configs.tables: the choice)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from fsbench.errors import InvalidArgument
from fsbench.kernels.configs.options import check_options

CHUNK = 64
"""Hidden columns of a TMA box: 128 bytes, the widest that its swizzle takes."""
BLOCK_TOKENS = 128
"""Tokens of a TMA box of the weight, and of a noise group's span."""
ROWS = 64
"""Batch rows of a warpgroup: the M of its instruction."""
_SHARED = 225 * 1024  # 227 KiB less the barriers


@dataclass(frozen=True)
class HopperConfig:
    """One way to cut the problem (docs/kernel.md).

    warpgroups: that compute, each on 64 batch rows of a program.
    block_v, block_d: vocabulary rows and hidden columns of a stage.
    num_stages: of the ring between the loading warp and the computing warpgroups.
    contiguous: the tiles of a program are neighbours; else those of a round are.
    split: two programs may share a block of tokens (fused.hopper.split), so that all have equal
        work; the order of tiles is that of `contiguous` then. Up to 64 rows.
    """

    warpgroups: int
    block_v: int
    block_d: int
    num_stages: int
    contiguous: bool
    split: bool = False

    def __post_init__(self) -> None:
        check_options(
            self,
            warpgroups=(1, 2, 3),
            block_v=(128, 256),
            block_d=(64, 128, 256),
            num_stages=range(2, 17),
        )
        if self.split and not self.can_split:
            raise InvalidArgument(
                "split: expected False but with 1 warpgroup and block_v 128; "
                f"got {self.warpgroups} and {self.block_v}"
            )
        if self.shared_bytes > _SHARED:
            raise InvalidArgument(
                f"num_stages: expected stages of {_SHARED} bytes in all; got {self.shared_bytes}"
            )

    def narrowed(self) -> HopperConfig:
        """The same with tiles of 128 tokens, and as many stages as fit.

        Such a kernel compiles in half of the time or less, since all of a tile is unrolled.
        """
        if self.block_v == 128:
            return self
        stages = _SHARED // ((self.block_b + 128) * self.block_d * 2)
        return replace(self, block_v=128, num_stages=min(16, stages))

    @property
    def block_b(self) -> int:
        """Batch rows of a program."""
        return self.warpgroups * ROWS

    @property
    def can_split(self) -> bool:
        """Whether there is a kernel that splits the blocks of these tiles."""
        return (self.warpgroups, self.block_v) == (1, BLOCK_TOKENS)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of the ring of a program; elements have 2 bytes."""
        return (self.block_b + self.block_v) * self.block_d * 2 * self.num_stages

    def boxes(self, B: int) -> tuple[int, int]:
        """(batch rows of a TMA box, boxes of a warpgroup's rows): no more rows than B has."""
        if B > ROWS:
            return ROWS, 1
        half = max(4, 1 << (B - 1).bit_length() >> 1)
        return (half, 2) if half >= 8 else (8, 1)

    def __str__(self) -> str:
        order = "s" if self.split else "c" if self.contiguous else ""
        return f"hopper-g{self.warpgroups}v{self.block_v}d{self.block_d}p{self.num_stages}{order}"


BUCKETS = (64, 128, 192, 256)
"""Upper ends of the buckets of B; a larger B uses the last bucket's config."""


def space(B: int) -> list[HopperConfig]:
    """The tuning space for one bucket of B: no warpgroup without rows, and all stages that fit."""
    warpgroups = -(-B // ROWS) if B <= 3 * ROWS else 2
    found = []
    for block_v, block_d in product((128, 256), (64, 128, 256)):
        stage_bytes = (warpgroups * ROWS + block_v) * block_d * 2
        stages = min(16, _SHARED // stage_bytes)
        if stages >= 2:
            found += [
                HopperConfig(warpgroups, block_v, block_d, stages, contiguous)
                for contiguous in (False, True)
            ]
    return found
