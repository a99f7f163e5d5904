"""screened_sample's tile shapes: what it refuses."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import problem

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.configs.screen import default_configs
from fsbench.kernels.screened.api import screened_sample
from fsbench.kernels.screened.head import prepare_head


@pytest.mark.parametrize("samples", [1, 2])
def test_configs_that_it_refuses(samples):
    """Also where they are not used: in torch, and with several samples."""
    hidden, weight = problem(2, 64, 16, torch.bfloat16)
    head, seed = prepare_head(weight), torch.tensor([0])
    screen, resolve = default_configs(2, 16, hidden.device)
    for configs, error, message in (
        ((1, 2), InvalidType, "expected a ScreenConfig or HopperScreenConfig first; got int"),
        ((screen, screen), InvalidType, "expected a ResolveConfig second; got ScreenConfig"),
        ((screen,), InvalidArgument, "expected two, of both launches; got 1"),
        ((), InvalidArgument, "expected two, of both launches; got 0"),
        (screen, InvalidType, "expected a tuple; got ScreenConfig"),
    ):
        with pytest.raises(error, match=f"configs: {message}"):
            screened_sample(hidden, head, seed=seed, configs=configs, num_samples=samples)
    screened_sample(hidden, head, seed=seed, configs=(screen, resolve), num_samples=samples)
