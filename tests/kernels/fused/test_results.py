"""flash_sample in the interpreter: seeds of requests, several samples, log-probabilities."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_sample_cases import (
    NOISE,
    SEED,
    TILES,
    check,
    columns,
    counter,
    normal_logits,
    problem,
    stored,
)

from fsbench.kernels import Sample, flash_sample

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("noise", NOISE)
def test_samples_are_draws_of_their_own(noise):
    """Each is the oracle's of its number; the first is that of a call for one.

    Eleven take more than one launch, the last with a number that is no power of two.
    """
    call = {**stored(normal_logits(4, 128)), "noise": noise, "offset": counter(7), "config": TILES}
    many = check(**call, num_samples=11, temperature=2.0, return_logprob=True, return_logz=True)
    assert many.tokens.shape == (4, 11) and many.valid.shape == (4,)
    assert all(len(set(row)) >= 8 for row in many.tokens.tolist())
    assert many.tokens[:, 0].tolist() == check(**call, temperature=2.0).tokens.tolist()


@pytest.mark.parametrize("noise", NOISE)
def test_samples_of_rows_without_a_draw(noise):
    logits = normal_logits(18, 100)
    logits[[3, 17]] = torch.nan
    T = torch.ones(18)
    T[5], T[6] = 0.0, -1.0
    sample = check(
        **stored(logits),
        temperature=T,
        num_samples=2,
        noise=noise,
        config=TILES,
        return_logprob=True,
        return_logz=True,
    )
    assert sample.tokens[[3, 6, 17]].tolist() == [[-1, -1]] * 3
    assert sample.tokens[5].tolist() == [int(logits[5].argmax())] * 2


@pytest.mark.parametrize("V", [60, 300])
def test_log_probabilities_of_samples_whose_last_tile_is_less_than_half_full(V):
    """Nothing is written for the half beyond the vocabulary."""
    check(
        **stored(normal_logits(5, V)),
        num_samples=2,
        noise="token",
        config=replace(TILES, block_v=256),
        return_logprob=True,
    )


@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("shift", [-1000.0, 1000.0])
def test_log_probabilities_of_logits_far_from_zero(shift, noise):
    """Neither overflow nor underflow: log Z is about the shift, whatever its size."""
    logits = normal_logits(3, 100) + shift
    logits[1, 7] += 200.0
    call = {**stored(logits), "noise": noise, "config": TILES}
    sample = check(**call, return_logprob=True, return_logz=True)
    assert (sample.logprob <= 1e-4).all()
    assert sample.logprob[1].abs() < 1e-4


@pytest.mark.parametrize("num_samples", [1, 2])
def test_out_is_written_and_returned(num_samples):
    hidden, weight = problem(3, 100, 24)
    call = {"hidden": hidden, "weight": weight, "seed": SEED, "config": TILES}
    call |= {"num_samples": num_samples, "return_logprob": True, "return_logz": True}
    call |= {"return_entropy": True, "return_rank": True, "return_top": 3}
    fresh = flash_sample(**call)
    assert (fresh.logprob.dtype, fresh.logz.dtype) == (torch.float32, torch.float32)
    fields = [torch.empty_like(field) for field in fresh]
    given = Sample(*fields)
    assert flash_sample(**call, out=given) is given
    for field, field_of_fresh in zip(fields, fresh, strict=True):
        assert torch.equal(field, field_of_fresh)
    assert len(columns(fresh.tokens)) == num_samples
