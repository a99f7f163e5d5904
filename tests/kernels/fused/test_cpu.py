"""flash_sample on CPU tensors without the interpreter, and any combination of options in both."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
import triton
from flash_sample_cases import (
    NOISE,
    SEED,
    TILES,
    check,
    counter,
    normal_logits,
    packed,
    problem,
)

from fsbench.kernels import flash_sample
from fsbench.kernels.fused import launch as _launch

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_launch(monkeypatch):
    """As without TRITON_INTERPRET; fails the test if the kernel is launched."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(_launch, "launch", None)


def combination(number: int, dtypes=(torch.float16, torch.float32)) -> dict:
    """A call with options drawn at random, every one of them absent in some."""
    chance = random.Random(number)
    dtype = chance.choice(dtypes)
    B, V, D = chance.choice([1, 5, 18]), chance.choice([33, 127, 140]), chance.choice([15, 24, 72])
    hidden, weight = problem(B, V + chance.choice([0, 27]), D, dtype, sigma=3.0)
    weight[V:], weight[V + 1 :: 3] = 1e4 * hidden[0].sign(), torch.nan  # padding
    call = {"hidden": hidden, "weight": weight, "vocab_size": V}
    per_row = torch.linspace(0, 2, B)
    per_row[B // 2] = chance.choice([-1.0, -1e-30, torch.nan, torch.inf, -torch.inf, 0.5])
    bias = normal_logits(B, V).to(chance.choice([torch.bfloat16, torch.float16, torch.float32]))
    bias[:, 1::5] = -torch.inf
    mask = normal_logits(B, V) > 0
    mask[0] = chance.choice([True, False])
    words = packed(mask, padding=True)
    more = torch.full((B, 2), -1, dtype=torch.int32)  # of a padded vocabulary
    choices = {
        "temperature": [0.0, 0.4, 1.0, per_row, per_row],
        "bias": [None, bias, bias[0].clone()],
        "mask": [None, mask, packed(mask), words, torch.cat([words, more], 1)],
        "seed": [SEED, counter(*range(B)) - 2**50],
        "offset": [None, counter(-1), counter(*range(B)) * 2**30],
        "num_samples": [1, 2],
        "soft_cap": [None, 4.0],
        "return_logprob": [False, True],
        "return_logz": [False, True],
        "noise": NOISE,
        "config": [None, TILES],
    }
    return call | {name: chance.choice(values) for name, values in choices.items()}


@pytest.mark.interpreter
@pytest.mark.parametrize("number", range(48))
def test_any_combination_of_options_in_the_interpreter(number):
    check(**combination(number))


@pytest.mark.parametrize("number", range(16))
def test_any_combination_of_options_by_the_reference(number, no_launch):
    check(**combination(number))


@pytest.mark.parametrize("number", range(6))
def test_bf16_is_computed_by_the_reference(number, monkeypatch):
    """In the interpreter too, which would multiply it wrongly."""
    monkeypatch.setattr(_launch, "launch", None)
    check(**combination(number, [torch.bfloat16]))


def test_without_triton_cpu_tensors_are_sampled_all_the_same(tmp_path):
    """Triton is a dependency on Linux only."""
    (tmp_path / "triton.py").write_text("raise ModuleNotFoundError('No module named triton')\n")
    code = (
        "import torch; from fsbench.kernels import flash_sample; "
        "print(flash_sample(torch.ones(2, 8), torch.ones(9, 8), seed=torch.tensor([1])).tokens)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tensor([")


def test_log_probabilities_of_a_temperature_that_counts_as_zero_are_those_of_one():
    hidden, weight = problem(2, 50, 16)
    call = {"hidden": hidden.bfloat16(), "weight": weight.bfloat16(), "seed": SEED}
    cold, greedy = (
        flash_sample(**call, temperature=T, return_logprob=True, return_logz=True)
        for T in (1e-40, 0.0)
    )
    assert torch.equal(cold.logprob, greedy.logprob)
    assert torch.equal(cold.logz, greedy.logz)
