"""flash_sampling_auto measures flash_sample with its defaults; the matmul alone."""

from __future__ import annotations

import pytest
import torch

import fsbench.kernels
from fsbench.discover import discover
from fsbench.kernels import flash_sampling, flash_sampling_token
from fsbench.kernels.flash_sampling_auto import PROVIDER
from fsbench.problem import Problem


def test_no_sampler_file_hides_a_public_function():
    names = discover()  # imports every sampler file
    assert not set(fsbench.kernels.__all__) & set(names)
    assert callable(fsbench.kernels.flash_sample)


@pytest.mark.interpreter
def test_it_calls_flash_sample_without_naming_a_kernel():
    problem = Problem(B=3, D=64, V=500, dtype="fp32", device="cpu", temperature=0.7)
    hidden, weight = torch.randn(3, 64), torch.randn(500, 64) / 8
    seed, offset = torch.tensor([5]), torch.tensor([2])
    launch = PROVIDER.build(problem, weight)
    called = fsbench.kernels.flash_sample(hidden, weight, temperature=0.7, seed=seed, offset=offset)
    assert launch.config == fsbench.kernels.describe(hidden, weight)
    assert torch.equal(launch(hidden, seed, offset), called.tokens)


@pytest.mark.interpreter
@pytest.mark.parametrize("sampler", [flash_sampling, flash_sampling_token])
@pytest.mark.parametrize(("B", "D", "V"), [(1, 64, 256), (17, 72, 1000)])
def test_the_kernel_without_sampling_returns_the_largest_logits(sampler, B, D, V):
    torch.manual_seed(1)
    hidden, weight = torch.randn(B, D), torch.randn(V, D)
    problem = Problem(B, D, V, "fp32", device="cpu")
    launch = sampler.PROVIDER.matmul_form(problem, weight)
    unread = torch.zeros(1, dtype=torch.int64)
    largest = launch(hidden, unread, unread).amax(0)
    torch.testing.assert_close(largest, (hidden @ weight.T).amax(1))
