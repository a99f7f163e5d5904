"""Tile shapes of the Hopper kernel, and the tuning space (configs.tables: the choice)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

from fsbench.errors import InvalidArgument
from fsbench.kernels.configs.portable import check_options

CHUNK = 64
"""Hidden columns of a TMA box: 128 bytes, the widest for its swizzle."""
BLOCK_TOKENS = 128
"""Tokens of a TMA box of the weight, and of the span of a noise group."""
ROWS = 64
"""Batch rows of a warpgroup: the M of its instruction."""
PAIR = 5 * ROWS
"""Batch rows of two blocks that are paired."""
EXTRA_BOX = 32
"""Batch rows of a TMA box of hidden in a mixed block; its last box has the extra rows."""
_SHARED = 225 * 1024  # 227 KiB less the barriers
_MOST_STAGES = 3  # with 128 rows and weights of one byte
_TRANSPOSED = 32 * 1024  # two tiles of 64 rows and 128 tokens, half of one at a time
_EXTRA_TRANSPOSED = 16 * 1024  # two tiles of 32 rows and 128 tokens, half of one at a time


@dataclass(frozen=True)
class HopperConfig:
    """Tile shapes of the Hopper kernel (docs/design/kernels.md).

    Attributes:
        warpgroups: Warpgroups that compute, each on 64 batch rows of a program.
        block_v, block_d: Vocabulary rows and hidden columns of a stage.
        num_stages: Stages of the ring between the loading warp and the computing warpgroups.
        contiguous: Whether the tiles of a program are neighbors; else those of a round are.
        split: Whether two programs may share a block of tokens (fused.hopper.split), so that all
            have equal work, in the order of `contiguous`. For up to 64 rows.
        paired: Whether two blocks of rows, 320 in all, share the rows of their third warpgroups; in
            these rows each has half of a tile's tokens.
        extra_rows: Batch rows of a program beyond those of two warpgroups, 16 or 32, with the
            tokens on the M side of the instruction (fused.hopper.mixed); or 0.
        one_byte: Whether the kernel is for weights of one byte (fused.hopper.quantized). Both
            warpgroups have all rows of a program and half of its tokens each; blocks are split,
            too. With more than 64 rows, 3 stages fit.
    """

    warpgroups: int
    block_v: int
    block_d: int
    num_stages: int
    contiguous: bool
    split: bool = False
    paired: bool = False
    one_byte: bool = False
    extra_rows: int = field(default=0, metadata={"in_tables": True})

    def __post_init__(self) -> None:
        check_options(
            self,
            warpgroups=(1, 2, 3),
            block_v=(128, 256),
            block_d=(64, 128, 256),
            num_stages=range(2, 17),
            extra_rows=(0, 16, 32),
        )
        if self.split and not self.can_split:
            raise InvalidArgument(
                "split: expected False but with 1 warpgroup and block_v 128; "
                f"got {self.warpgroups} and {self.block_v}"
            )
        if self.paired and not self.can_pair:
            raise InvalidArgument(
                "paired: expected False but with 3 warpgroups and block_v 256; "
                f"got {self.warpgroups} and {self.block_v}"
            )
        if self.extra_rows and (self.warpgroups, self.block_v) != (2, 2 * BLOCK_TOKENS):
            raise InvalidArgument(
                "extra_rows: expected 0 but with 2 warpgroups and block_v 256; "
                f"got {self.warpgroups} and {self.block_v}"
            )
        shapes = (self.warpgroups, self.block_v, self.block_d, self.contiguous, self.split)
        if self.one_byte and shapes != (2, 256, 128, False, False):
            raise InvalidArgument(
                "one_byte: expected False but with 2 warpgroups, block_v 256 and block_d 128; "
                f"got {self.warpgroups}, {self.block_v} and {self.block_d}"
            )
        if self.shared_bytes > _SHARED:
            raise InvalidArgument(
                f"num_stages: expected stages of {_SHARED} bytes in all; got {self.shared_bytes}"
            )

    def narrowed(self) -> HopperConfig:
        """Return this config with tiles of 128 tokens, and as many stages as fit.

        Its kernel compiles in half of the time or less, since a tile is unrolled.
        """
        if self.block_v == 128:
            return self
        warpgroups = 3 if self.extra_rows else self.warpgroups
        stages = min(16, _SHARED // ((warpgroups * ROWS + 128) * self.block_d * 2))
        return replace(
            self, warpgroups=warpgroups, block_v=128, num_stages=stages, paired=False, extra_rows=0
        )

    @property
    def block_b(self) -> int:
        """Batch rows of a program; the average if blocks are paired."""
        return PAIR // 2 if self.paired else self.warpgroups * ROWS + self.extra_rows

    def blocks(self, B: int) -> int:
        """Return the number of blocks of rows for B rows."""
        return -(-B // PAIR) * 2 if self.paired else -(-B // self.block_b)

    def cuts(self) -> list[HopperConfig]:
        """Return the configs with the same tiles that cut a batch into blocks of rows."""
        if self.warpgroups != 2 or self.block_v != 2 * BLOCK_TOKENS:
            return [self]
        three = replace(self, warpgroups=3)
        return [self, three, replace(three, paired=True)]

    def busiest(self, B: int, V: int, programs: int) -> int:
        """Return rows times blocks of tokens of the program that computes most.

        The time is proportional to it where the tensor cores are the limit, from about 200 rows on.
        """
        blocks = self.blocks(B)
        share = max(1, min(programs // blocks, -(-V // self.block_v)))
        rounds = -(-blocks * share // programs)
        return rounds * -(-V // (BLOCK_TOKENS * share)) * self.block_b

    @property
    def can_pair(self) -> bool:
        """Whether a kernel with these tiles can pair blocks."""
        return (self.warpgroups, self.block_v) == (3, 2 * BLOCK_TOKENS)

    @property
    def can_split(self) -> bool:
        """Whether a kernel with these tiles can split blocks."""
        return (self.warpgroups, self.block_v) == (1, BLOCK_TOKENS)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program in bytes: its ring, and the transposition of its tiles."""
        if self.one_byte:
            return (2 * ROWS + self.block_v) * self.block_d * self.num_stages + _TRANSPOSED
        rows = self.warpgroups * ROWS + self.block_v + (EXTRA_BOX if self.extra_rows else 0)
        return rows * self.block_d * 2 * self.num_stages + (
            _EXTRA_TRANSPOSED if self.extra_rows else 0
        )

    def too_small(self, B: int) -> bool:
        """Whether a ring for weights of one byte has no room for B rows of hidden."""
        return self.one_byte and self.num_stages > _MOST_STAGES and B > ROWS

    def boxes(self, B: int) -> tuple[int, int]:
        """Return (batch rows of a TMA box, boxes of a warpgroup); boxes hold no row beyond B."""
        if self.extra_rows:
            return EXTRA_BOX, ROWS // EXTRA_BOX
        if B > ROWS:
            return ROWS, 1
        half = max(4, 1 << (B - 1).bit_length() >> 1)
        return (half, 2) if half >= 8 else (8, 1)

    def __str__(self) -> str:
        order = "b" if self.one_byte else "s" if self.split else "c" if self.contiguous else ""
        order += "h" if self.paired else f"r{self.extra_rows}" if self.extra_rows else ""
        return f"hopper-g{self.warpgroups}v{self.block_v}d{self.block_d}p{self.num_stages}{order}"


ONE_BYTE = HopperConfig(2, 256, 128, 4, False, one_byte=True)
"""Tiles for weights of one byte and up to 64 rows."""
MANY_ROWS = replace(ONE_BYTE, num_stages=3)
"""Tiles for weights of one byte and more than 64 rows."""
BUCKETS = (64, 128, 144, 160, 192, 256)
"""Upper ends of the buckets of B; a larger B is cut in one of the last bucket's `cuts`."""


def space(B: int) -> list[HopperConfig]:
    """Return the tuning space of one bucket of B: no idle warpgroup, and all stages that fit."""
    warpgroups = -(-B // ROWS) if B <= 3 * ROWS else 2
    configs = []
    for block_v, block_d in product((128, 256), (64, 128, 256)):
        stage_bytes = (warpgroups * ROWS + block_v) * block_d * 2
        stages = min(16, _SHARED // stage_bytes)
        if stages >= 2:
            configs += [
                HopperConfig(warpgroups, block_v, block_d, stages, contiguous)
                for contiguous in (False, True)
            ]
    if 2 * ROWS < B <= 2 * ROWS + EXTRA_BOX:
        extra_rows = B - 2 * ROWS
        configs += [
            HopperConfig(2, 256, 64, 4, order, extra_rows=extra_rows) for order in (False, True)
        ]
    return configs
