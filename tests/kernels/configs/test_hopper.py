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


@pytest.mark.parametrize("rows", range(8, 209, 8))
def test_rows_on_the_n_side_are_whole_boxes(rows):
    config = HopperConfig(2, 256, 64, 3, False, rows)
    box, number = config.boxes(rows)
    assert config.block_b == rows and rows % box == 0 and 8 <= box <= 64 and number == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((2, 256, 64, 3, False, 216), "rows_on_n: expected a multiple of 8 up to 208; got 216"),
        ((2, 128, 64, 3, False, 144), "block_v: expected 128 for each of 2 warpgroups"),
        ((2, 256, 64, 4, False, 144), "num_stages: expected stages of 230400 bytes in all"),
    ],
)
def test_what_does_not_fit_is_refused(fields, message):
    with pytest.raises(InvalidArgument, match=message):
        HopperConfig(*fields)
