"""Tile shapes of kernels for `fsbench tune`, on an imitated GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fsbench import inputs
from fsbench.discover import discover
from fsbench.kernels.configs import choice as _choice
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.configs.tables import KERNELS, find
from fsbench.kernels.providing.tuning import tuning
from fsbench.problem import Problem

TUNED = [kernel for kernel in KERNELS if kernel != "portable-byte"]
"""Kernels for heads of 16 bits, which `fsbench tune` has."""


@pytest.fixture
def gpu(monkeypatch):
    """Imitate a current GPU with a name and shared memory."""

    def use(name, shared=232448):
        properties = SimpleNamespace(
            name=name, shared_memory_per_block_optin=shared, major=9, minor=0
        )
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        forget()

    def forget():
        _choice.default_config.cache_clear()
        _choice.hopper_row.cache_clear()

    yield use
    forget()


def test_every_kernel_of_the_tables_can_be_tuned():
    tunings = [entry.provider.tuning for entry in discover().values() if entry.provider.tuning]
    assert sorted(tuning.kernel for tuning in tunings) == sorted(TUNED)
    assert all(tuning.buckets == KERNELS[tuning.kernel][1] for tuning in tunings)


@pytest.mark.parametrize("kernel", TUNED)
@pytest.mark.parametrize("D", [4096, 8192])
def test_the_default_is_timed_first(gpu, kernel, D):
    gpu("NVIDIA H200")
    for B in tuning(kernel).buckets:
        configs = tuning(kernel).configs(Problem(B, D, 128256))
        assert configs[0] == find(kernel, B, D, "NVIDIA H200")
        assert len(configs) == len(set(configs)) > 3


def test_a_gpu_with_less_shared_memory_gets_what_fits(gpu):
    limit = 101376
    gpu("NVIDIA L40S", limit)
    for config in tuning("portable").configs(Problem(64, 4096, 128256)):
        assert config.shared_bytes(2) * config.ctas_per_sm < limit


@pytest.mark.interpreter
@pytest.mark.parametrize("kernel", ["portable", "portable-token"])
def test_a_launch_uses_the_config_and_draws_the_same(kernel):
    problem = Problem(3, 64, 300, "fp32", device="cpu")
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    seed, offset = torch.tensor([1]), torch.tensor([2])
    tokens = []
    for block_v in (128, 256):
        config = TileConfig(16, block_v, 64, 128, False, False, 4, 1, 1)
        launch = tuning(kernel).build(problem, weight, config)
        assert launch.config == f"{config} pointers" or launch.config == f"{config} tma"
        tokens.append(launch(hidden, seed, offset))
    assert torch.equal(*tokens)
