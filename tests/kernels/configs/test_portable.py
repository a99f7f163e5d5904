"""Tile shapes: every batch size has one, and it fits the shared memory of small GPUs too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.kernels.configs.choice import default_config
from fsbench.kernels.configs.portable import BUCKETS, TileConfig, bucket, space
from fsbench.kernels.configs.tables import find


def test_a_batch_size_belongs_to_the_next_bucket():
    assert [bucket(B) for B in (1, 16, 17, 64, 65, 256, 1000)] == [16, 16, 32, 64, 128, 256, 256]


@pytest.mark.parametrize("B", BUCKETS)
@pytest.mark.parametrize("limit", [99 * 1024, 163 * 1024, 227 * 1024])
def test_the_untuned_choice_fits(B, limit):
    fitted = find("portable", B, 4096, "NVIDIA GeForce").fitted(limit, 2)
    assert fitted.shared_bytes(2) <= limit
    assert fitted.num_stages >= 2


@pytest.mark.parametrize("B", BUCKETS)
@pytest.mark.parametrize("D", [2048, 8192])
def test_the_tuned_choice_is_one_of_the_tuning_space(B, D):
    assert find("portable", B, D, "NVIDIA H200") in space(B)


def test_a_flattened_loop_needs_room_to_turn_a_tile():
    """Compiled for an H200, this one takes 237,592 bytes; there are 232,448."""
    config = TileConfig(32, 256, 128, 32, True, True, 8, 3, 1)
    assert config.shared_bytes(2) > 232_448
    assert config not in space(32)
    assert replace(config, flatten=False) in space(32)


def test_fitting_takes_stages_and_nothing_else():
    config = TileConfig(16, 128, 64, 16, True, False, 4, 4, 2)
    stage = config.shared_bytes(2) // 4
    assert config.fitted(4 * stage, 2) is config
    assert config.fitted(4 * stage - 1, 2) == TileConfig(16, 128, 64, 16, True, False, 4, 3, 2)
    assert config.fitted(0, 2).num_stages == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_v": 64}, "block_v: expected 128 or 256; got 64"),
        ({"block_v": 512}, "block_v: expected 128 or 256; got 512"),
        ({"block_d": 8}, "block_d: expected 16 or .* or 256; got 8"),
        ({"block_d": 48}, "block_d: expected 16 or .* or 256; got 48"),
        ({"block_d": 512}, "block_d: expected 16 or .* or 256; got 512"),
        ({"slice": 8}, "slice: expected 16 or 32 or 64 or 128; got 8"),
        ({"slice": 256}, "slice: expected 16 or 32 or 64 or 128; got 256"),
    ],
)
def test_sizes_that_the_kernel_cannot_take_are_refused(change, message):
    sizes = {"block_b": 16, "block_v": 128, "block_d": 64, "slice": 16, **change}
    with pytest.raises(InvalidArgument, match=message):
        TileConfig(**sizes, v_on_m=False, flatten=False, num_warps=4, num_stages=1, ctas_per_sm=1)


def test_the_interpreter_has_a_config_of_its_own():
    assert default_config(5, 64, torch.device("cpu"), 4).block_b == 16
