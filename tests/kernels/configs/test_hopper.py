"""Configs of the Hopper kernel."""

from __future__ import annotations

import pytest

from fsbench.errors import InvalidArgument
from fsbench.kernels.configs.hopper import HopperConfig

CONFIG = HopperConfig(1, 128, 128, 4, False)


@pytest.mark.parametrize("B", range(1, 65))
def test_boxes_hold_every_row_and_from_8_rows_on_no_other(B):
    rows, number = CONFIG.boxes(B)
    firsts = [min(rows * i, max(B - rows, 0)) for i in range(number)]
    held = {row for first in firsts for row in range(first, first + rows)}
    assert set(range(B)) <= held
    assert held == set(range(B)) or B < 8


@pytest.mark.parametrize("B", [65, 128, 1000])
def test_a_full_warpgroup_has_one_box(B):
    assert CONFIG.boxes(B) == (64, 1)


def test_a_narrowed_config_has_tiles_of_128_tokens_and_all_stages_that_fit():
    wide = HopperConfig(2, 256, 64, 4, True)
    narrow = wide.narrowed()
    assert narrow == HopperConfig(2, 128, 64, 7, True)
    with pytest.raises(InvalidArgument):
        HopperConfig(2, 128, 64, 8, True)
    assert CONFIG.narrowed() is CONFIG and narrow.narrowed() is narrow
    assert PAIRED.narrowed() == HopperConfig(3, 128, 64, 5, False)


PAIRED = HopperConfig(3, 256, 64, 4, False, paired=True)


def test_paired_blocks_have_320_rows():
    assert [PAIRED.blocks(B) for B in (1, 320, 321, 640, 641)] == [2, 2, 4, 4, 6]
    assert [CONFIG.blocks(B) for B in (1, 64, 65)] == [1, 1, 2]
    assert str(PAIRED) == "hopper-g3v256d64p4h"


@pytest.mark.parametrize("sizes", [(2, 256, 64, 4), (3, 128, 64, 5)])
def test_a_pair_that_there_is_no_kernel_for_is_refused(sizes):
    with pytest.raises(InvalidArgument, match="paired: expected False but with 3 warpgroups"):
        HopperConfig(*sizes, False, paired=True)


def test_a_batch_is_cut_into_blocks_of_which_there_is_a_kernel():
    two = HopperConfig(2, 256, 64, 4, True)
    three = HopperConfig(3, 256, 64, 4, True)
    assert two.cuts() == [two, three, HopperConfig(3, 256, 64, 4, True, paired=True)]
    for sizes in ((64, 4), (128, 2)):  # all stages that fit
        assert len(HopperConfig(2, 256, *sizes, True).cuts()) == 3
    for alone in (HopperConfig(2, 128, 64, 7, True), three, HopperConfig(1, 256, 64, 5, False)):
        assert alone.cuts() == [alone]


TWO, THREE = HopperConfig(2, 256, 64, 4, True), HopperConfig(3, 256, 64, 4, False)


@pytest.mark.parametrize(
    ("config", "B", "blocks", "expected"),
    [
        (TWO, 256, 1187, 18 * 128),  # 66 programs for each of 2 blocks of rows
        (TWO, 257, 1187, 27 * 128),
        (THREE, 384, 1187, 18 * 192),
        (PAIRED, 257, 1187, 18 * 160),
        (TWO, 257, 3, 2 * 128),  # no more programs than tiles of 2 blocks
        (TWO, 133 * 128, 10, 2 * 10 * 128),  # more blocks of rows than programs: two rounds
    ],
)
def test_what_the_busiest_program_computes(config, B, blocks, expected):
    assert config.busiest(B, blocks * 128, 132) == expected
    assert config.busiest(B, blocks * 128 - 127, 132) == expected
