"""The battery on a GPU: what it shares between checks there, and every sampler's ci tier."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fsbench.discover import discover
from fsbench.inputs import serving
from fsbench.provider import Kind
from fsbench.verify import verify
from fsbench.verify.check import TEMPERATURES, Setting
from fsbench.verify.drawing import Draws

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

SETTING = Setting("cuda", "bf16", TEMPERATURES[0], second=TEMPERATURES[1])
ROUNDED_AGAIN = {"flashinfer_gumbel", "flashinfer_top_k_top_p", "vllm_gumbel", "vllm_flashinfer"}
"""They divide logits of 16 bits by T in place, which is exact at powers of two."""

FOUND = {
    name: entry
    for name, entry in discover().items()
    if entry.provider and entry.provider.kind in (Kind.EXACT, Kind.GREEDY)
}


@pytest.fixture(params=FOUND.values(), ids=FOUND)
def sampler(request):
    reason = request.param.unavailable_reason("cuda")
    if reason:
        pytest.skip(reason)
    return request.param.provider


@pytest.fixture
def setting(sampler):
    """The default setting; with a quantized head for samplers that take no other."""
    if sampler.name in ROUNDED_AGAIN:
        return Setting("cuda", "bf16", 1.0, second=0.5)
    if sampler.unsupported_reason(SETTING.problem(64, 1000)) is None:
        return SETTING
    return replace(SETTING, weights=sampler.capabilities.quantized[0])


def test_it_passes_the_battery(sampler, setting):
    failed = [check for check in verify(sampler, setting, "ci") if not check.passed]
    assert not failed


def test_every_code_of_the_noise_map(sampler):
    if sampler.noise_map is None:
        pytest.skip("offers no noise map")
    (check,) = verify(sampler, SETTING, "full", ["noise map"])
    assert check.passed and check.draws == 2**32, check


def test_a_seed_gives_the_same_draws_again(sampler, setting):
    """Also of samplers that draw from torch's generator, by replays of a graph."""
    sampler = serving(sampler, setting.weights)
    draws = Draws(sampler, setting.problem(64, 1000), {"flat": torch.zeros(1000)})
    twice = []
    for _ in range(2):
        draws.seed(5)
        twice.append(draws.draw("flat", 3))
    assert torch.equal(*twice)
    if sampler.kind is Kind.EXACT:
        draws.seed(6)
        assert not torch.equal(draws.draw("flat", 3), twice[0])
        assert not torch.equal(twice[0][0], twice[0][1])
