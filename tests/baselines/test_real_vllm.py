"""`vllm_gumbel` on vLLM's own sampler, with its kernels in the interpreter (real_vllm).

Triton's filters do not run in the interpreter; below 8 rows vLLM sorts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from real_vllm import real_vllm

from fsbench.baselines.vllm_gumbel import PROVIDER
from fsbench.problem import Problem
from fsbench.verify.drawing import exact_head, random_logits

pytestmark = pytest.mark.interpreter


@pytest.fixture(scope="module")
def sampler():
    able = replace(PROVIDER.capabilities, devices=("cpu",), dtypes=("fp32",))
    with real_vllm():
        yield replace(PROVIDER, capabilities=able)


def tokens(sampler, seed=5, step=9, **options):
    problem = Problem(5, 64, 1500, "fp32", **{"temperature": 0.5, "device": "cpu", **options})
    hidden, weight, logits = exact_head(problem, random_logits(problem, 0))
    launch = sampler.build(problem, weight)
    return launch(hidden, torch.tensor([seed]), torch.tensor([step])), logits


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}]
)
def test_options_that_leave_one_token_are_greedy(sampler, options):
    drawn, logits = tokens(sampler, **options)
    assert torch.equal(drawn, logits.argmax(1))


def test_draws_depend_on_seed_and_step_and_repeat(sampler):
    hot = {"temperature": 8.0}
    first = tokens(sampler, **hot)[0]
    assert torch.equal(first, tokens(sampler, **hot)[0])
    for other in ({"seed": 6}, {"seed": 5 + 2**40}, {"step": 10}):
        assert not torch.equal(first, tokens(sampler, **other, **hot)[0]), other


def test_the_full_call_has_seeds_and_temperatures(sampler):
    problem = Problem(5, 64, 1500, "fp32", device="cpu")
    hidden, weight, logits = exact_head(problem, random_logits(problem, 0))
    T = torch.tensor([0.5, 2.0, 0.0, 1.0, 1.0])
    seed, offset = torch.arange(5), torch.tensor([3])
    drawn = sampler.sample(hidden, weight, seed=seed, offset=offset, temperature=T).tokens
    assert drawn[2] == logits[2].argmax()
    flipped = {"seed": seed.flip(0), "offset": offset, "temperature": T.flip(0)}
    assert torch.equal(sampler.sample(hidden.flip(0), weight, **flipped).tokens.flip(0), drawn)
