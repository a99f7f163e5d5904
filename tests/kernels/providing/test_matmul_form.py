"""The fused kernel without sampling does the fused kernel's matmul, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from fsbench.kernels import flash_sampling, flash_sampling_token
from fsbench.problem import Problem

pytestmark = pytest.mark.interpreter


@pytest.mark.parametrize("sampler", [flash_sampling, flash_sampling_token])
@pytest.mark.parametrize(("B", "D", "V"), [(1, 64, 256), (17, 72, 1000)])
def test_the_largest_logit_of_every_row(sampler, B, D, V):
    torch.manual_seed(1)
    hidden, weight = torch.randn(B, D), torch.randn(V, D)
    problem = Problem(B, D, V, "fp32", device="cpu")
    launch = sampler.PROVIDER.matmul_form(problem, weight)
    unread = torch.zeros(1, dtype=torch.int64)
    largest = launch(hidden, unread, unread).amax(0)
    torch.testing.assert_close(largest, (hidden @ weight.T).amax(1))
