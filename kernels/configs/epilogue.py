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


class Rows(NamedTuple):
    """`first` to `last` rows, from least_d hidden columns on."""

    first: int
    last: int
    least_d: int = 0


class TilesOfGpu(NamedTuple):
    """The tile shapes and kernels that are faster on a GPU because of the work of an epilogue.

    record: the times. tiles: tile shapes of the Hopper kernel. portable: rows at which the portable
    kernel is faster than Hopper's. token: rows at which it is the slower one with token noise, in
    calls that only draw.
    """

    record: str
    tiles: dict[Epilogue, tuple[TilesFor, ...]]
    portable: dict[Epilogue, tuple[Rows, ...]]
    token: tuple[Rows, ...] = ()


_TWO = HopperConfig(2, 128, 64, 7, False)
_THREE = HopperConfig(3, 128, 64, 5, False)
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
    {
        Epilogue(stored=True): (Rows(97, 127),),
        Epilogue(sums=True, stored=True): (Rows(81, 127),),
    },
)
"""An H100, for D = 2560, 4096 and 8192.

With sums, paired blocks are slower at many sizes: a team adds up 32 sums for 512 rows. Where logits
are stored, two blocks of 128 rows with tiles of 128 tokens are slow up to 200 rows (193 with sums),
likely because the second block stores less."""
TILES_FOR_H200 = TilesOfGpu(
    "results/h200/tile-shapes-20261128",
    {
        Epilogue(sums=True): (
            TilesFor(129, 160, 2560, _THREE),
            TilesFor(257, 288, sys.maxsize, _MIXED),
            TilesFor(289, 320, 6144, _MIXED_WIDE),
        ),
        Epilogue(stored=True): (TilesFor(129, 160, 2560, _THREE),),
        Epilogue(sums=True, stored=True): (TilesFor(129, 160, 6144, _THREE),),
    },
    {
        Epilogue(sums=True): (Rows(193, 224, 4096),),
        Epilogue(stored=True): (Rows(193, 208), Rows(209, 224, 4096)),
        Epilogue(sums=True, stored=True): (Rows(193, 208), Rows(209, 224, 4096)),
    },
    (Rows(33, 63, 6145), Rows(129, 192, 6145), Rows(257, 320, 6145)),
)
"""An H200, for D = 2560, 4096 and 8192; with sums alone, 200 of the rows from 193 to 224.
Two H200s were measured (the other one in results/h200/tile-shapes-20261127), and what is faster on
both together is chosen. The times with token noise are in results/h200/token-noise-20261128, for
D = 4096 and 8192."""
TILES_FOR = {128: TILES_FOR_H100, 64: TILES_FOR_H200}
"""What `choice.portable_rows` is for a GPU -> its tile shapes."""
UNTIMED = TilesOfGpu("", {}, {})
"""Any other GPU."""
