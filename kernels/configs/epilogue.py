"""The work of an epilogue besides drawing, and the tile shapes that are faster with it."""

from __future__ import annotations

import sys
from typing import NamedTuple

from fsbench.kernels.configs.hopper import HopperConfig


class Epilogue(NamedTuple):
    """The work of a launch's epilogue besides drawing; each part takes registers and time.

    processed: add a bias or apply a mask. sums: sum over the vocabulary, for log-probabilities.
    stored: store the logits, for filters or ranks.
    """

    processed: bool = False
    sums: bool = False
    stored: bool = False

    def __str__(self) -> str:
        return " and ".join(["log-probabilities"] * self.sums + ["stored logits"] * self.stored)


DRAW = Epilogue()
"""The epilogue of a plain call."""


class TilesFor(NamedTuple):
    """Tile shapes for `first` to `last` rows, up to max_d hidden columns."""

    first: int
    last: int
    max_d: int
    config: HopperConfig


class TilesOfGpu(NamedTuple):
    """Tile shapes of a GPU by the work of the epilogue, and the record of their times."""

    record: str
    tiles: dict[Epilogue, tuple[TilesFor, ...]]


_TWO = HopperConfig(2, 128, 64, 7, False)
_THREE, _THREE_WIDE = HopperConfig(3, 128, 64, 5, False), HopperConfig(3, 256, 64, 4, False)
_MIXED = HopperConfig(2, 256, 64, 4, False, extra_rows=16)
_MIXED_WIDE = HopperConfig(2, 256, 64, 4, False, extra_rows=32)
TILES_FOR_H100 = TilesOfGpu(
    "results/h100/tile-shapes-20261127",
    {
        Epilogue(sums=True): (
            TilesFor(256, 256, 2560, _TWO),
            TilesFor(257, 288, sys.maxsize, _MIXED),
            TilesFor(289, 320, 2560, _MIXED_WIDE),
        ),
        Epilogue(stored=True): (TilesFor(208, 256, 8192, _TWO),),
        Epilogue(sums=True, stored=True): (TilesFor(200, 256, 8192, _TWO),),
    },
)
"""Tile shapes of an H100 that are faster than those of plain calls, by the work of the epilogue.

With sums, paired blocks are slower at many sizes: a team adds up 32 sums for 512 rows. Where logits
are stored, two blocks of 128 rows with tiles of 128 tokens are slow up to 200 rows (193 with sums),
likely because the second block stores less. Measured for D = 2560, 4096 and 8192."""
TILES_FOR_H200 = TilesOfGpu(
    "results/h200/tile-shapes-20261127",
    {
        Epilogue(sums=True): (TilesFor(257, 288, sys.maxsize, _MIXED),),
        Epilogue(sums=True, stored=True): (
            TilesFor(129, 160, 6144, _THREE),
            TilesFor(129, 160, sys.maxsize, _THREE_WIDE),
        ),
    },
)
"""The same of an H200, measured before teams added up the sums; where logits are stored, too, for
D = 4096 alone."""
TILES_FOR = {128: TILES_FOR_H100, 64: TILES_FOR_H200}
"""What `choice.portable_rows` is for a GPU -> its tile shapes."""
MOST_ROWS_FOR = {
    Epilogue(stored=True): 96,
    Epilogue(sums=True, stored=True): 80,
}
"""Largest B of 65 to 127 rows at which an H100's Hopper kernel is the faster one, by the work
of the epilogue (TILES_FOR_H100.record); other calls are faster by it at all of them."""
