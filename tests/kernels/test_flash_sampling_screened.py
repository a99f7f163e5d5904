"""The battery on the screened sampler in torch, without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsbench.kernels.flash_sampling_screened import PROVIDER
from fsbench.verify import verify
from fsbench.verify.check import Setting

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.full
def test_it_passes_what_asks_for_tokens_and_options():
    on_cpu = replace(PROVIDER, capabilities=replace(PROVIDER.capabilities, devices=("cpu",)))
    only = ["oracle", "undefined rows", "greedy", "edges", "filters", "invariance"]
    checks = list(verify(on_cpu, Setting("cpu", "bf16"), "ci", only))
    assert [check.name for check in checks] == only
    assert all(check.verdict == "ok" for check in checks), checks
