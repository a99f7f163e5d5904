"""What an engine draws with: flash_sample, or a sampler of `fsbench list` in its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fsbench.errors import InvalidArgument, ProviderUnavailable
from fsbench.integrations.draw import Head, known, make_draw, missing
from fsbench.kernels import flash_sample

B, D, V = 4, 64, 500


def problem():
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(B, D, generator=generator).bfloat16()
    weight = torch.randn(V + 12, D, generator=generator).bfloat16() / 4  # with padding rows
    counters = torch.arange(B) + 7
    return hidden, weight, counters


def test_flash_sample_gets_all_of_a_request():
    hidden, weight, counters = problem()
    temperature = torch.tensor([0, 0.5, 1, 2])
    draw = make_draw("flash_sample", Head(weight, V, soft_cap=3.0))
    direct = flash_sample(
        *(hidden, weight),
        temperature=temperature,
        seed=counters,
        offset=counters + 1,
        soft_cap=3.0,
        vocab_size=V,
    )
    assert torch.equal(draw(hidden, temperature, counters, counters + 1), direct.tokens)
    assert draw.declines(temperature.numpy()) is None


def test_a_rival_never_draws_padding():
    hidden, weight, counters = problem()
    weight[V:] = 9 * hidden[0]  # would win by far
    draw = make_draw("multinomial", Head(weight, V))
    for _ in range(20):
        assert (draw(hidden, torch.ones(B), counters, counters) < V).all()


def test_a_rival_declines_what_it_would_draw_wrongly():
    _, weight, _ = problem()
    draw = make_draw("multinomial", Head(weight, V))
    assert draw.declines(np.ones(B)) is None
    assert draw.declines(np.array([1, 0, 1, 1])) == "temperature"


def test_names():
    names = known()
    assert names["flash_sample"] == ("FlashSampling", True)
    assert "multinomial" in names and "matmul_only" not in names and "greedy" not in names
    assert missing("flash_sample", "cpu") is None
    assert missing("flash_sampling", "cpu") == "runs on cuda only"
    with pytest.raises(InvalidArgument, match="did you mean 'flash_sample'"):
        missing("flash_smaple", "cpu")


def test_what_cannot_be_made_is_named():
    _, weight, _ = problem()
    with pytest.raises(ProviderUnavailable, match="runs on cuda only"):
        make_draw("flash_sampling", Head(weight, V))
    with pytest.raises(InvalidArgument, match="without a soft cap"):
        make_draw("multinomial", Head(weight, V, soft_cap=30.0))
    with pytest.raises(InvalidArgument, match="sampler: expected one of"):
        make_draw("matmul_only", Head(weight, V))
