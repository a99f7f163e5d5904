"""flash_sample: its results do not depend on tiles, neighbors or the kind of call."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import product

import pytest
import torch
from flash_sample_cases import (
    NOISE,
    SEED,
    TILES,
    check,
    counter,
    exact_logits,
    normal_logits,
    packed,
    problem,
    same_bits,
    stored,
)

from fsbench import inputs
from fsbench.kernels import Sample, flash_sample, truncated_sample
from fsbench.kernels.configs import gpu
from fsbench.kernels.configs.epilogue import DRAW, Epilogue
from fsbench.kernels.fused import launch as launching
from fsbench.kernels.launch import launch_cache
from fsbench.kernels.launch.request import checked_request, raw_logits

pytestmark = pytest.mark.usefixtures("one_thread")
interpreted = pytest.mark.interpreter
SCORES = {"return_logprob": True, "return_logz": True}


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
    hidden, weight = problem(2, 50, 16, torch.bfloat16)
    call = {"hidden": hidden, "weight": weight, "seed": SEED, **SCORES}
    cold, greedy = (flash_sample(**call, temperature=T) for T in (1e-40, 0.0))
    assert torch.equal(cold.logprob, greedy.logprob)
    assert torch.equal(cold.logz, greedy.logz)


@interpreted
@pytest.mark.parametrize(("noise", "rows"), [("token", 128), ("group", 70)])
def test_hidden_gets_the_absent_rows_of_a_large_block_with_token_noise(monkeypatch, noise, rows):
    load, loaded = launching.load_operands, []

    def load_operands(*args):
        operands = load(*args)

        def count_rows(hidden, weight):
            loaded.append(len(hidden))
            return operands.load(hidden, weight)

        return operands._replace(load=count_rows)

    monkeypatch.setattr(launching, "load_operands", load_operands)
    hidden, weight = problem(70, 300, 32)
    call = {"hidden": hidden, "weight": weight, "seed": SEED, "noise": noise, **SCORES}
    expected = flash_sample(**call, config=TILES)
    sample = flash_sample(**call, config=replace(TILES, block_b=128))
    assert torch.equal(sample.tokens, expected.tokens)
    assert torch.allclose(sample.logprob, expected.logprob, atol=1e-5)
    assert loaded == [70, rows]


@interpreted
def test_greedy_calls_with_token_noise_have_the_tiles_of_calls_without(monkeypatch):
    noises = []

    def choose(hidden, weight, noise, *others):
        noises.append(noise)
        return TILES

    monkeypatch.setattr(launching, "choose", choose)
    hidden, weight = problem(3, 210, 32)
    for temperature in (1.0, 0.0, torch.zeros(3)):
        flash_sample(hidden, weight, seed=SEED, noise="token", temperature=temperature)
    assert noises == ["token", "none", "token"]


@interpreted
def test_the_choice_of_tiles_knows_what_the_epilogue_does(monkeypatch):
    calls = []

    def choose(hidden, weight, noise, kernel, config, epilogue):
        calls.append(epilogue)
        return TILES

    monkeypatch.setattr(launching, "choose", choose)
    hidden, weight = problem(2, 200, 32)
    mask = torch.ones(2, 200, dtype=torch.bool)
    for options in ({}, {"soft_cap": 3.0}, {"mask": mask}, {"bias": torch.zeros(200)}):
        flash_sample(hidden, weight, seed=SEED, return_entropy=True, **options)
    flash_sample(hidden, weight, seed=SEED)
    truncated_sample(hidden, weight, seed=SEED, top_k=5)
    truncated_sample(hidden, weight, seed=SEED, top_k=5, return_logprob=True)
    sums, changed = Epilogue(sums=True), Epilogue(processed=True, sums=True)
    stored = Epilogue(stored=True)
    assert calls == [sums, sums, changed, changed, DRAW, stored, stored._replace(sums=True)]


@interpreted
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize(
    ("seed", "offset"),
    [(2**63 - 1, 2**32 - 1), (-(2**63), 2**32 + 1), (0x0123456789ABCDEF, -1)],
)
def test_all_bits_of_seed_and_the_low_half_of_offset_count(seed, offset, noise):
    call = {**stored(normal_logits(9, 100)), "noise": noise, "temperature": 5.0, "config": TILES}
    sample = check(**call, seed=counter(seed), offset=counter(offset))
    for other in (counter(seed ^ 1 << 62), counter(seed ^ 1)):
        changed = flash_sample(**call, seed=other, offset=counter(offset))
        assert changed.tokens.tolist() != sample.tokens.tolist()
    for bit, same in ((31, False), (32, True)):
        changed = flash_sample(**call, seed=counter(seed), offset=counter(offset ^ 1 << bit))
        assert (changed.tokens.tolist() == sample.tokens.tolist()) == same


OTHER_TILES = {
    "group": [
        replace(TILES, block_b=32, block_v=256, block_d=32, flatten=True),
        replace(TILES, v_on_m=True, slice=16, block_d=16, ctas_per_sm=3),
    ],
    "token": [
        replace(TILES, block_b=32, block_v=256, slice=32, flatten=True),
        replace(TILES, v_on_m=True, block_d=16, ctas_per_sm=3),
    ],
}


@interpreted
@pytest.mark.parametrize("noise", NOISE)
def test_results_do_not_depend_on_the_tiles(noise):
    head, weight = inputs.head_with_logits(normal_logits(16, 300), torch.float16, 40)
    call = {
        "hidden": head[torch.arange(17) % 16],
        "weight": weight,
        "noise": noise,
        "temperature": torch.linspace(0, 2, 17),
        "offset": counter(*range(17)),
        "mask": packed(normal_logits(17, 300) > 0),
        **SCORES,
    }
    first = check(**call, config=TILES)
    for config in OTHER_TILES[noise]:
        sample = check(**call, config=config)
        assert sample.tokens.tolist() == first.tokens.tolist(), config
        assert same_bits(sample.logprob, first.logprob), config
        assert same_bits(sample.logz, first.logz), config


@interpreted
@pytest.mark.parametrize("multiprocessors", [16, 17, 40])
def test_scores_do_not_depend_on_the_teams_of_programs(multiprocessors, monkeypatch):
    """Teams of 16 programs add up masses: one, one and a team of one, two and a half."""
    hidden, weight = problem(5, 40 * 128 - 5, 16)
    call = {"config": replace(TILES, block_v=128), **SCORES, "return_entropy": True}
    expected = flash_sample(hidden, weight, seed=SEED, **call)
    monkeypatch.setattr(gpu, "_INTERPRETED_MULTIPROCESSORS", multiprocessors)
    monkeypatch.setattr(launch_cache, "LAUNCHES", {})
    for _ in range(2):  # the first call has to leave its counters at 0
        sample = flash_sample(hidden, weight, seed=SEED, **call)
        assert torch.equal(sample.tokens, expected.tokens)
        for name in ("logprob", "logz", "entropy"):
            assert same_bits(getattr(sample, name), getattr(expected, name)), name


@interpreted
def test_log_z_depends_on_the_logits_alone():
    """Not on the noise, the tiles, the row's number, its neighbors, or greedy rows."""
    logits = normal_logits(3, 200, sigma=12.0) - 300.0
    T = torch.tensor([1.0, 1e-6, 50.0])
    whole = flash_sample(**stored(logits), seed=SEED, temperature=T, return_logz=True).logz
    assert whole.isfinite().all()
    for noise, config in product(NOISE, (TILES, replace(TILES, block_v=256, slice=16))):
        call = {"seed": SEED, "return_logz": True, "noise": noise, "config": config}
        for row in (1, 2):
            alone = flash_sample(**stored(logits[[row]]), **call, temperature=float(T[row]))
            assert same_bits(alone.logz, whole[[row]]), (row, noise, config)
        greedy = flash_sample(**stored(logits), **call, temperature=0.0)
        assert same_bits(greedy.logz[[0]], whole[[0]])


@interpreted
def test_out_is_written_and_returned():
    hidden, weight = problem(3, 100, 24)
    call = {"hidden": hidden, "weight": weight, "seed": SEED, "config": TILES, **SCORES}
    call |= {"num_samples": 2, "return_entropy": True}
    call |= {"return_rank": True, "return_top": 3}
    fresh = flash_sample(**call)
    out = Sample(*(torch.empty_like(field) for field in fresh))
    assert flash_sample(**call, out=out) is out
    assert all(torch.equal(*pair) for pair in zip(out, fresh, strict=True))
    assert fresh.tokens.shape == (3, 2)


@interpreted
def test_what_is_returned_by_default_and_that_operands_are_left_as_they_were():
    hidden, weight = problem(5, 140, 32, torch.float16)
    before, seed, offset = exact_logits(hidden, weight), counter(4), counter(5)
    sample = flash_sample(hidden, weight, seed=seed, offset=offset)
    assert isinstance(sample, Sample) and sample[2:] == (None,) * 6
    assert (sample.tokens.dtype, sample.tokens.shape) == (torch.int64, (5,))
    assert (sample.valid.dtype, sample.valid.shape) == (torch.bool, (5,))
    assert torch.equal(exact_logits(hidden, weight), before)
    assert (seed.tolist(), offset.tolist()) == ([4], [5])
    drawn = {
        noise: flash_sample(hidden, weight, seed=seed, offset=offset, noise=noise).tokens.tolist()
        for noise in NOISE
    }
    assert sample.tokens.tolist() == drawn["group"] != drawn["token"]


def test_converting_a_weight_in_parts_gives_the_logits_of_converting_it_at_once():
    D, V = 2048, 1300  # more entries than are converted at once, and a shorter last part
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, D, generator=generator).bfloat16()
    weight = torch.nn.Parameter(torch.randn(V, D, generator=generator).bfloat16())
    seed = torch.zeros(1, dtype=torch.int64)
    request = checked_request(
        hidden, weight, seed=seed, offset=None, temperature=1.0, soft_cap=None, bias=None,
        mask=None, vocab_size=None, noise="token",
    )  # fmt: skip
    expected = hidden.double() @ weight.detach().double().T
    torch.testing.assert_close(raw_logits(request), expected.float(), rtol=1e-5, atol=1e-4)
