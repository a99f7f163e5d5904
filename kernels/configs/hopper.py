"""Tile shapes of the Hopper kernel, and the tuning space (configs.tables: the choice)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from fsbench.errors import InvalidArgument

CHUNK = 64
"""Hidden columns of a TMA box: 128 bytes, the widest that its swizzle takes."""
ROWS = 64
"""Batch rows of a warpgroup: the M of its instruction."""
_MOST_ON_N = 208  # a thread's accumulators for 128 tokens, of the 240 registers that it has
_SHARED = 225 * 1024  # 227 KiB less the barriers
_TURNING = 16 * 1024  # through which a warpgroup turns 64 rows of logits


@dataclass(frozen=True)
class HopperConfig:
    """One way to cut the problem (docs/kernel.md).

    warpgroups: that compute. Each has 64 batch rows of a program, on the M side of its instruction.
    block_v, block_d: vocabulary rows and hidden columns of a stage.
    num_stages: of the ring between the loading warp and the computing warpgroups.
    contiguous: the tiles of a program are neighbours; else those of a round are.
    rows_on_n: if not 0, so many batch rows of a program are on the N side, a multiple of 8, and
        each warpgroup has them all, for 128 vocabulary rows of its own.
    """

    warpgroups: int
    block_v: int
    block_d: int
    num_stages: int
    contiguous: bool
    rows_on_n: int = 0

    def __post_init__(self) -> None:
        for name, options in (
            ("warpgroups", (1, 2, 3)),
            ("block_v", (128, 256)),
            ("block_d", (64, 128, 256)),
            ("num_stages", tuple(range(2, 17))),
        ):
            if getattr(self, name) not in options:
                wanted = " or ".join(map(str, options))
                raise InvalidArgument(f"{name}: expected {wanted}; got {getattr(self, name)}")
        if self.rows_on_n not in range(0, _MOST_ON_N + 1, 8):
            raise InvalidArgument(
                f"rows_on_n: expected a multiple of 8 up to {_MOST_ON_N}; got {self.rows_on_n}"
            )
        if self.rows_on_n and self.block_v != 128 * self.warpgroups:
            raise InvalidArgument(
                f"block_v: expected 128 for each of {self.warpgroups} warpgroups with rows_on_n; "
                f"got {self.block_v}"
            )
        if self.shared_bytes > _SHARED:
            raise InvalidArgument(
                f"num_stages: expected stages of {_SHARED} bytes in all; got {self.shared_bytes}"
            )

    @property
    def block_b(self) -> int:
        """Batch rows of a program."""
        return self.rows_on_n or self.warpgroups * ROWS

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program: the ring, of elements of 2 bytes, and what turns logits."""
        turning = self.warpgroups * _TURNING if self.rows_on_n else 0
        return (self.block_b + self.block_v) * self.block_d * 2 * self.num_stages + turning

    def boxes(self, B: int) -> tuple[int, int]:
        """(batch rows of a TMA box, boxes of a warpgroup's rows): no more rows than B has."""
        if self.rows_on_n:  # its largest power of two: pieces of rows are of whole boxes
            return min(ROWS, self.rows_on_n & -self.rows_on_n), 1
        if B > ROWS:
            return ROWS, 1
        half = max(4, 1 << (B - 1).bit_length() >> 1)
        return (half, 2) if half >= 8 else (8, 1)

    def __str__(self) -> str:
        order = "c" if self.contiguous else ""
        rows = f"n{self.rows_on_n}" if self.rows_on_n else f"g{self.warpgroups}"
        return f"hopper-{rows}v{self.block_v}d{self.block_d}p{self.num_stages}{order}"


BUCKETS = (64, 128, 144, 160, 192, 208, 256)
"""Upper ends of the buckets of B; see rows_at_once for a larger B."""


def rows_at_once(B: int) -> int:
    """How many rows decide the config: a batch of more than 256 is cut into equal parts."""
    return -(-B // -(-B // BUCKETS[-1]))


def space(B: int) -> list[HopperConfig]:
    """The tuning space for one bucket of B: no warpgroup without rows, and all stages that fit."""
    warpgroups = -(-B // ROWS) if B <= 3 * ROWS else 2
    shapes = [
        (warpgroups, *sizes, 0) for sizes in product((128, 256), (64, 128, 256))
    ]
    if 2 * ROWS < B <= _MOST_ON_N:
        shapes.append((2, 256, 64, B))
    found = []
    for warpgroups, block_v, block_d, rows_on_n in shapes:
        turning = 2 * _TURNING if rows_on_n else 0
        stage_bytes = ((rows_on_n or warpgroups * ROWS) + block_v) * block_d * 2
        stages = min(16, (_SHARED - turning) // stage_bytes)
        if stages >= 2:
            found += [
                HopperConfig(warpgroups, block_v, block_d, stages, contiguous, rows_on_n)
                for contiguous in (False, True)
            ]
    return found
