"""Filters from a screened head on a GPU: token for token those of the weight with token noise."""

from __future__ import annotations

import pytest
import torch

from fsbench.kernels import prepare_head, truncated_sample
from fsbench.kernels.launch.result import TruncatedSample

pytestmark = pytest.mark.gpu


def matrices(
    B: int, D: int, V: int, sigma: float = 3.0, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(B + D + V)
    hidden = torch.randn(B, D, device="cuda") * sigma / D**0.5
    return hidden.to(dtype), torch.randn(V, D, device="cuda", dtype=dtype)


def on_device(seed: int) -> torch.Tensor:
    return torch.tensor([seed], device="cuda")


def assert_same(hidden: torch.Tensor, weight: torch.Tensor, **options: object) -> TruncatedSample:
    """Five draws from the head are those of its weight; the last of them."""
    head, offset = prepare_head(weight), on_device(0)
    options = {"seed": on_device(7), "offset": offset, "temperature": 1.5, **options}
    for _ in range(5):
        sample = truncated_sample(hidden, head, **options)
        same = truncated_sample(hidden, weight, noise="token", **options)
        assert sample.found is not None
        assert torch.equal(sample.tokens, same.tokens) and torch.equal(sample.valid, same.valid)
        offset += 1
    return sample


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [1000, 1152, 4096, 8192])
@pytest.mark.parametrize("B", [1, 5, 8, 9, 16])
@pytest.mark.parametrize("top_k", [1, 20, 64])
def test_tokens_are_equal_to_the_last_one(B, D, dtype, top_k):
    hidden, weight = matrices(B, D, 32_001, dtype=dtype)
    sample = assert_same(hidden, weight, top_k=top_k, top_p=0.95, min_p=0.01)
    assert sample.valid.all() and (sample.found >= top_k).all()


@pytest.mark.parametrize("V", [20, 100, 5000, 70_007, 151_936])
@pytest.mark.parametrize("sigma", [0.1, 3.0, 16.0])
def test_any_number_of_tokens_and_any_spread(V, sigma):
    hidden, weight = matrices(7, 2048, V, sigma)
    for filters in ({}, {"top_p": 0.7}, {"min_p": 0.05}):
        assert_same(hidden, weight, top_k=12, **filters)


def test_options_together():
    B, V = 16, 40_000
    hidden, weight = matrices(B, 1024, V)
    row = torch.arange(B, device="cuda")
    assert_same(
        hidden,
        weight,
        top_k=torch.tensor([0, 1, 20, 64, 65, -1, 50, 7] * 2, device="cuda"),
        top_p=0.5 + row / 20,
        min_p=row / 200,
        temperature=(row % 5) / 2.0,
        bias=torch.randn(B, V, device="cuda"),
        mask=torch.rand(B, V, device="cuda") < 0.3,
        soft_cap=20.0,
        seed=row,
        vocab_size=V,
    )


def test_rows_that_are_computed_in_full_are_right_and_counted():
    hidden, weight = matrices(16, 1024, 40_000)
    hidden[5, 0], hidden[11, 3] = torch.nan, torch.inf
    hidden[7] *= 1e-30  # too small to be rounded
    sample = assert_same(hidden, weight, top_k=20, top_p=0.9)
    assert (sample.found[[5, 7, 11]] == -1).all() and (sample.found >= 20).sum() == 13
    assert sample.valid.sum() == 14


def test_few_are_computed_at_the_paper_s_sizes():
    for D, V in ((4096, 151_936), (8192, 128_256)):
        hidden, weight = matrices(16, D, V)
        sample = assert_same(hidden, weight, top_k=20, top_p=0.95)
        assert (sample.found >= 20).all() and sample.found.float().mean() < 2000


def test_a_graph_draws_afresh_at_every_replay():
    hidden, weight = matrices(4, 1024, 20_000)
    head, seed, offset = prepare_head(weight), on_device(3), on_device(0)
    options = {"seed": seed, "offset": offset, "top_k": 20, "top_p": 0.95, "temperature": 2.0}
    truncated_sample(hidden, head, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample = truncated_sample(hidden, head, **options)
    for _ in range(10):
        offset += 1
        hidden.copy_(torch.randn_like(hidden) / 10)
        graph.replay()
        same = truncated_sample(hidden, weight, noise="token", **options)
        assert torch.equal(sample.tokens, same.tokens) and sample.found.min() >= 20
