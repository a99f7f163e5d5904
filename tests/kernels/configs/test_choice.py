"""Which kernel flash_sample runs, on a GPU that can run both."""

from __future__ import annotations

import pytest
import torch

from fsbench.errors import InvalidArgument
from fsbench.kernels.configs import choice as _choice
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig

PORTABLE = TileConfig(16, 256, 64, 128, False, False, 4, 1, 1)
HOPPER = HopperConfig(1, 128, 64, 2, False)


@pytest.fixture
def both(monkeypatch):
    """A GPU that can run both kernels; what is chosen for it is forgotten afterwards."""
    monkeypatch.setattr(_choice, "why_not_hopper", lambda *facts: None)
    monkeypatch.setattr(_choice, "default_config", lambda *shape: PORTABLE)
    monkeypatch.setattr(_choice, "hopper_config", lambda *shape: HOPPER)
    _choice.config_for.cache_clear()
    yield
    _choice.config_for.cache_clear()


def chosen(B: int, **wish: object) -> object:
    return _choice.choose(torch.zeros(B, 64), torch.zeros(500, 64), "group", **wish)


def test_the_number_of_rows_decides(both):
    assert [chosen(B) for B in (1, 64, 65, 1000)] == [PORTABLE, PORTABLE, HOPPER, HOPPER]


@pytest.mark.parametrize("B", [1, 1000])
def test_a_wish_is_granted(both, B):
    assert chosen(B, kernel="hopper") == HOPPER
    assert chosen(B, kernel="portable") == PORTABLE
    own = HopperConfig(1, 128, 64, 3, False)
    assert chosen(B, config=own) == own


def test_where_the_hopper_kernel_cannot_run():
    assert isinstance(chosen(1000), TileConfig)
    with pytest.raises(InvalidArgument, match="got hopper, but it needs a GPU"):
        chosen(1000, kernel="hopper")
