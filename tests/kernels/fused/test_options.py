"""flash_sample in the interpreter: what changes the logits, and temperatures per row."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from flash_sample_cases import (
    NOISE,
    TILES,
    check,
    counter,
    normal_logits,
    packed,
    problem,
    stored,
)

from fsbench.kernels import flash_sample, truncated_sample
from fsbench.kernels.fused import launch as launching

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


def random_mask(B: int, V: int, share: float = 0.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(B + V)
    return torch.rand(B, V, generator=generator) < share


def test_a_bias_and_a_mask_are_told_to_the_choice_of_tiles(monkeypatch):
    told = []

    def choose(*arguments):
        told.append(arguments[-1])
        return TILES

    monkeypatch.setattr(launching, "choose", choose)
    hidden, weight = problem(2, 200, 32)
    arguments = {"hidden": hidden, "weight": weight, "seed": counter(0)}
    mask = random_mask(2, 200)
    for sample in (partial(flash_sample, return_logz=True), partial(truncated_sample, top_k=3)):
        for options in ({}, {"soft_cap": 3.0}, {"mask": mask}, {"bias": torch.zeros(200)}):
            sample(**arguments, **options)
    assert told == [False, False, True, True] * 2


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("form", ["scalar", "tensor"])
def test_the_lowest_of_equal_logits_wins_at_temperature_zero(form, noise):
    """Also across groups and words: 2 is of a later group than 8, and of a later word."""
    ties = [(2, 8), (8, 1), (7, 128), (131, 136), (0, 199), (127, 128, 129), (16, 2, 64)]
    logits = torch.full((len(ties) + 1, 200), -5.0)
    for row, tied in enumerate(ties):
        logits[row, list(tied)] = -0.5
    T = 0.0 if form == "scalar" else torch.zeros(len(logits))
    tokens = check(**stored(logits), temperature=T, noise=noise).tokens
    assert tokens.tolist() == [*(min(tied) for tied in ties), 0]


@pytest.mark.parametrize("noise", NOISE)
def test_the_only_allowed_token_is_returned_whatever_the_noise(noise):
    only = torch.tensor([0, 1, 8, 31, 63, 64, 127, 128, 199])
    logits = normal_logits(len(only), 200, sigma=20.0)
    mask = torch.arange(200) == only[:, None]
    logits[mask] = -1000.0
    T = torch.tensor([0.0, 1.0, 1e-30, 100.0, 1.0, 0.5, 1.0, 0.2, 1.0])
    for step in range(2):
        sample = flash_sample(
            **stored(logits),
            mask=packed(mask) if step else mask,
            temperature=T,
            seed=counter(step),
            offset=counter(step * 1000),
            num_samples=2,
            noise=noise,
            return_logprob=True,
        )
        assert sample.tokens.T.tolist() == [only.tolist()] * 2
        assert sample.valid.all()
        assert sample.logprob.abs().max() < 1e-4


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_a_forbidden_token_is_never_returned(by, noise):
    """Nor does it spoil its row: not by a huge logit, nor masked by NaN or +inf."""
    logits = normal_logits(16, 100, sigma=0.5)
    allowed = random_mask(16, 100, 0.05)
    allowed[:, [3, 40]] = True
    if by == "mask":
        wild = torch.tensor([1e30, torch.nan, torch.inf, 100.0])
        logits = torch.where(allowed, logits, wild[torch.arange(100) % 4])
        call = {**stored(logits), "mask": packed(allowed)}
    else:
        call = stored(logits.where(allowed, -torch.inf))
    tokens = check(**call, num_samples=8, noise=noise, config=TILES, return_logz=True).tokens
    assert allowed.gather(1, tokens).all()
    assert (tokens == 3).sum() > 10 and (tokens == 40).sum() > 10


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("soft_cap", [0.5, 30.0, 1e3])
def test_soft_cap(soft_cap, noise):
    hidden, weight = problem(4, 129, 24, sigma=40.0)
    hidden[0, 3], hidden[1, 5] = 1e30, -1e30  # logits as large as they come
    hidden[2] = torch.nan
    check(
        hidden=hidden,
        weight=weight,
        soft_cap=soft_cap,
        temperature=0.6,
        noise=noise,
        return_logprob=True,
        return_logz=True,
    )
