"""Tile shapes: allowed values, memory, blocks of rows, and the tuning spaces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.kernels.configs import hopper, portable, screen
from fsbench.kernels.configs.choice import default_config
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig, bucket
from fsbench.kernels.configs.tables import find

CONFIG = HopperConfig(1, 128, 128, 4, False)
TWO, THREE = HopperConfig(2, 256, 64, 4, True), HopperConfig(3, 256, 64, 4, True)
PAIRED = replace(THREE, paired=True)
TILES = TileConfig(16, 128, 64, 16, True, False, 4, 4, 2)


# The portable kernel


def test_a_batch_size_belongs_to_the_next_bucket():
    assert [bucket(B) for B in (1, 16, 17, 64, 65, 256, 1000)] == [16, 16, 32, 64, 128, 256, 256]


@pytest.mark.parametrize("B", portable.BUCKETS)
def test_portable_tiles_fit_the_shared_memory(B):
    for limit in (99 * 1024, 163 * 1024, 227 * 1024):
        fitted = find("portable", B, 4096, "NVIDIA GeForce").fitted(limit, 2)
        assert fitted.shared_bytes(2) <= limit and fitted.num_stages >= 2
        space = portable.space(B, limit)
        assert space and all(c.shared_bytes(2) * c.ctas_per_sm <= limit for c in space)
    for D in (2048, 8192):
        assert find("portable", B, D, "NVIDIA H200") in portable.space(B)


def test_a_flattened_loop_needs_memory_to_transpose_a_tile():
    """Compiled for an H200, this config takes 237,592 bytes; a program may have 232,448."""
    config = TileConfig(32, 256, 128, 32, True, True, 8, 3, 1)
    assert config.shared_bytes(2) > 232_448
    assert config not in portable.space(32)
    assert replace(config, flatten=False) in portable.space(32)


def test_fitting_reduces_the_stages_only():
    stage = TILES.shared_bytes(2) // 4
    assert TILES.fitted(4 * stage, 2) is TILES
    assert TILES.fitted(4 * stage - 1, 2) == replace(TILES, num_stages=3)
    assert TILES.fitted(0, 2).num_stages == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_v": 64}, "block_v: expected 128 or 256; got 64"),
        ({"block_d": 48}, "block_d: expected 16 or .* or 256; got 48"),
        ({"slice": 256}, "slice: expected 16 or 32 or 64 or 128; got 256"),
    ],
)
def test_sizes_that_the_kernel_cannot_take_are_refused(change, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(TILES, **change)


def test_the_interpreter_has_small_tiles():
    assert default_config(5, 64, torch.device("cpu"), 4).block_b == 16


# The Hopper kernel


def test_boxes_hold_every_row_and_from_8_rows_on_no_other():
    for B in range(1, 65):
        rows, number = CONFIG.boxes(B)
        firsts = [min(rows * i, max(B - rows, 0)) for i in range(number)]
        held = {row for first in firsts for row in range(first, first + rows)}
        assert set(range(B)) <= held
        assert held == set(range(B)) or B < 8
    assert {CONFIG.boxes(B) for B in (65, 128, 1000)} == {(64, 1)}


def test_a_narrowed_config_has_tiles_of_128_tokens_and_all_stages_that_fit():
    narrow = TWO.narrowed()
    assert narrow == HopperConfig(2, 128, 64, 7, True)
    with pytest.raises(InvalidArgument):
        HopperConfig(2, 128, 64, 8, True)
    assert CONFIG.narrowed() is CONFIG and narrow.narrowed() is narrow
    assert (
        PAIRED.narrowed()
        == replace(TWO, extra_rows=32).narrowed()
        == HopperConfig(3, 128, 64, 5, True)
    )


def test_batches_are_cut_into_blocks_of_rows():
    assert [PAIRED.blocks(B) for B in (1, 320, 321, 640, 641)] == [2, 2, 4, 4, 6]
    assert [CONFIG.blocks(B) for B in (1, 64, 65)] == [1, 1, 2]
    assert [replace(TWO, extra_rows=16).blocks(B) for B in (144, 145, 288, 289)] == [1, 2, 2, 3]
    assert str(PAIRED) == "hopper-g3v256d64p4ch"
    assert str(replace(TWO, extra_rows=32)) == "hopper-g2v256d64p4cr32"
    assert TWO.cuts() == [TWO, THREE, PAIRED]
    assert len(HopperConfig(2, 256, 128, 2, True).cuts()) == 3
    for config in (HopperConfig(2, 128, 64, 7, True), THREE, HopperConfig(1, 256, 64, 5, False)):
        assert config.cuts() == [config]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"warpgroups": 2, "split": True}, "split: expected False but with 1 warpgroup"),
        ({"paired": True}, "paired: expected False but with 3 warpgroups"),
        ({"warpgroups": 3, "num_stages": 2, "paired": True}, "paired: expected False but with 3"),
        ({"extra_rows": 16}, "extra_rows: expected 0 but with 2 warpgroups and block_v 256"),
        ({"extra_rows": 8}, "extra_rows: expected 0 or 16 or 32"),
    ],
)
def test_a_form_without_a_kernel_is_refused(change, message):
    with pytest.raises(InvalidArgument, match=message):
        replace(CONFIG, **change)


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
def test_the_work_of_the_busiest_program(config, B, blocks, expected):
    assert config.busiest(B, blocks * 128, 132) == expected
    assert config.busiest(B, blocks * 128 - 127, 132) == expected


@pytest.mark.parametrize("B", hopper.BUCKETS)
def test_the_space_of_the_hopper_kernel(B):
    space = hopper.space(B)
    assert len(space) == len(set(space)) <= 12
    assert find("hopper", B, 4096, "NVIDIA H200") in space
    assert all(config.block_b >= min(B, 128) for config in space)


@pytest.mark.parametrize("B", screen.BUCKETS)
def test_the_space_of_the_screen(B):
    space = screen.space(B) + screen.hopper_space(B)
    assert 10 <= len(space) == len(set(space)) <= 40
    for gpu, capability in (("NVIDIA H200", (9, 0)), ("NVIDIA L40S", (8, 9))):
        assert find("screened", B, 4096, gpu, capability) in space
    assert all(config.block_b >= min(B, 64) for config in screen.space(B))
