"""The launches of a call from a screened head have all of their arguments, for each screen."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import CPU, SEED

from fsbench.kernels import prepare_head
from fsbench.kernels.configs.screen import HopperScreenConfig
from fsbench.kernels.configs.screen_choice import default_configs
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.launch.operands import processing
from fsbench.kernels.launch.request import checked_request
from fsbench.kernels.launch.result import empty_screened
from fsbench.kernels.screened.launch import ScreenedLaunch

pytestmark = pytest.mark.usefixtures("one_thread")

ABSENT = {"offset_ptr", "soft_cap", "bias_ptr", "row_bias_ptr", "mask_ptr"}
"""Arguments that a plain call without an offset does not have."""
OF_RANKS = {"first_token", "num_tokens", "buffers_ptr", "counts_ptr", "rank", "area"}
PORTABLE, RESOLVE = default_configs(3, 128, CPU)
HOPPER = HopperScreenConfig(32, 1, 128, 128, 4)


@pytest.mark.parametrize("screen", [PORTABLE, HOPPER], ids=["portable", "hopper"])
def test_a_plain_call_passes_all_arguments_to_both_kernels(screen, monkeypatch):
    launches = []
    monkeypatch.setattr(
        launch_cache, "_bound",
        lambda kernel, grid, arguments, moving: launches.append((kernel, arguments)),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 128, generator=generator).half()
    hidden = torch.randn(3, 128, generator=generator).half()
    head, out = prepare_head(weight), empty_screened(3, CPU)
    absent = dict.fromkeys(("offset", "soft_cap", "bias", "mask", "vocab_size"))
    request = checked_request(hidden, weight, seed=SEED, temperature=1.0, noise="token", **absent)
    ScreenedLaunch(request, head, (screen, RESOLVE), 0)(request, head, processing(request), out)
    for kernel, arguments in launches:
        assert set(kernel.arg_names) <= arguments.keys()
        missing = {name for name in kernel.arg_names if arguments[name] is None}
        assert missing == (ABSENT | OF_RANKS).intersection(kernel.arg_names)
    names = [kernel.__name__ for kernel, _ in launches]
    expected = "screen_kernel" if screen is PORTABLE else "hopper_screen_kernel"
    assert names == [expected, "resolve_kernel"]
