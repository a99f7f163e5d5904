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
