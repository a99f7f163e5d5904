"""The battery on the fused samplers' public call and on their noise map, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsbench.discover import discover
from fsbench.kernels.flash_sampling import PROVIDER
from fsbench.verify import verify
from fsbench.verify.check import Setting
from fsbench.verify.noise import check_noise_map

pytestmark = pytest.mark.usefixtures("one_thread")

MAPS = [
    entry.provider
    for entry in discover().values()
    if entry.provider and entry.provider.noise_map is not None
]


@pytest.mark.full
def test_the_call_passes_what_asks_for_options():
    """In bf16 on a CPU flash_sample is the reference: here its arguments are tried, and results."""
    on_cpu = replace(PROVIDER, capabilities=replace(PROVIDER.capabilities, devices=("cpu",)))
    only = ["oracle", "undefined rows", "greedy", "edges", "filters", "invariance"]
    checks = list(verify(on_cpu, Setting("cpu", "bf16"), "ci", only))
    assert [check.name for check in checks] == only
    assert all(check.verdict == "ok" for check in checks), checks


@pytest.mark.interpreter
@pytest.mark.parametrize("noise_map", {made.noise_map for made in MAPS})
def test_the_noise_map_is_finite_monotone_and_accurate(noise_map):
    """On a part of the codes, in the interpreter; `verify --tier full` tries all on a GPU."""
    check = check_noise_map(replace(PROVIDER, noise_map=noise_map), Setting("cpu", "fp32"), 2**18)
    assert check.passed and check.draws > 2**17, check
