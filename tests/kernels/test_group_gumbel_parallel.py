"""Parallel Group-Gumbel-Max in the interpreter: the algorithm in float64, its law, its log Z."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from capability_checks import assert_law

from fsbench import reference
from fsbench.kernels import group_gumbel_parallel as module
from fsbench.problem import Problem
from fsbench.reference.philox import random_words

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]

INF = float("inf")
SEED = -7


def draw(logits: torch.Tensor, step: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    seed, offset = torch.tensor([SEED]), torch.tensor([step])
    return module.group_gumbel_parallel(logits, seed, offset, temperature)


def algorithm(logits: torch.Tensor, step: int, temperature: float, group: int) -> torch.Tensor:
    """Tokens of Algorithm I.2 in float64, T > 0, from the specified noise."""
    B, V = logits.shape
    seed, offset, rows = torch.tensor([SEED]), torch.tensor([step]), torch.arange(B)
    scaled = logits.double() / temperature
    scores = scaled + reference.token_noise(V, seed, offset, rows)
    samples, masses = [], []
    for v0 in range(0, V, group):
        samples.append(v0 + scores[:, v0 : v0 + group].argmax(1))
        masses.append(scaled[:, v0 : v0 + group].logsumexp(1))
    bits, _, _, _ = random_words(torch.arange(len(masses)), rows, offset, 2 << 16, seed)
    chosen = (torch.stack(masses, 1) + reference.gumbel(bits)).argmax(1)
    return torch.stack(samples, 1)[rows, chosen]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(
    ("B", "V", "group", "dtype"),
    [
        (1, 1, 1024, torch.float32),
        (3, 129, 1024, torch.float16),
        (2, 2048, 1024, torch.float32),
        (3, 2500, 1024, torch.float16),
        (6, 100, 16, torch.float32),
    ],
    ids=str,
)
def test_tokens_and_log_z_are_those_of_the_algorithm(B, V, group, dtype, temperature, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_OF_GROUP", group)
    logits = 2 * torch.randn(B, V, generator=torch.Generator().manual_seed(V)) - 30
    logits = logits.to(dtype)
    for step in (2, 2**32 - 1):
        tokens, log_z = draw(logits, step, temperature)
        assert tokens.tolist() == algorithm(logits, step, temperature, group).tolist()
        exact = (logits.double() / temperature).logsumexp(1)
        assert log_z.dtype == torch.float32
        assert ((log_z - exact) / exact).abs().max() < 1e-6


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_the_algorithm_draws_from_the_softmax(temperature):
    """With the noise as specified, at a number of draws that the interpreter cannot make."""
    logits = 2 * torch.randn(40, generator=torch.Generator().manual_seed(1))
    same = logits.expand(2**13, -1)
    tokens = torch.cat([algorithm(same, step, temperature, 16) for step in range(8)])
    assert_law("tokens", tokens, (logits / temperature).softmax(0))


def test_the_kernel_draws_from_the_softmax(monkeypatch):
    """Few draws, but the kernel's: two groups, the second partial, with some zero-mass tokens."""
    monkeypatch.setattr(module, "TOKENS_OF_GROUP", 16)
    logits = torch.tensor([0.5, 0.0, 0.0, *[-INF] * 13, 0.5, 0.25, *[-INF] * 2])
    tokens, _ = draw(logits.expand(100, -1).contiguous(), 0, 0.5)
    assert_law("tokens", tokens, (logits / 0.5).softmax(0))


@pytest.mark.full
def test_choice_of_group_is_independent_of_token_noise_rows_and_steps(monkeypatch):
    """Four equally likely tokens, two in each of two groups.

    They are the tokens of the Philox words 0 and 1 in their groups: had group k the noise of word
    k, group 0 would be chosen just when token 0 beats token 2, so token 2 would never be drawn.
    """
    monkeypatch.setattr(module, "TOKENS_OF_GROUP", 16)
    logits = torch.full((64, 32), -INF)
    logits[:, [0, 2, 16, 18]] = 0.0
    steps = torch.stack([draw(logits, step, 1.0)[0] for step in (0, 1)])
    group, second = steps // 16, (steps % 16) // 2
    assert_law("tokens", (2 * group + second).flatten(), torch.full((4,), 0.25))
    half = torch.full((2,), 0.5)
    for number in group:
        assert_law("tokens", number, half)  # not one choice for all rows
    assert_law("tokens", (group[0] == group[1]).long(), half)  # nor one for all steps
    assert_law("tokens", (group[:, 1:] == group[:, :-1]).long(), half)  # nor for neighbours


def test_groups_without_mass_are_never_chosen(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_OF_GROUP", 16)
    logits = torch.full((4, 70), -INF)
    allowed = [[20], [69], [0, 1, 50], [33, 34]]
    for row, tokens in enumerate(allowed):
        logits[row, tokens] = -50.0  # far below the 0 of a sum taken for empty
    for step in range(3):
        tokens, log_z = draw(logits, step, 1.0)
        assert all(token in row for token, row in zip(tokens.tolist(), allowed, strict=True))
        np.testing.assert_allclose(log_z, logits.double().logsumexp(1), rtol=1e-6)
    assert draw(logits, 0, 0.0)[0].tolist() == [20, 69, 0, 33]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_draw_are_minus_one(temperature, monkeypatch):
    monkeypatch.setattr(module, "TOKENS_OF_GROUP", 64)
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(2))
    clean, clean_log_z = draw(logits, 0, temperature)
    logits[1, 199] = torch.nan
    logits[2] = -INF
    logits[4, 0] = INF
    tokens, log_z = draw(logits, 0, temperature)
    assert tokens.tolist() == [int(clean[0]), -1, -1, int(clean[3]), -1]
    assert log_z.isnan().tolist() == [False, True, True, False, True]
    assert torch.equal(log_z[[0, 3]], clean_log_z[[0, 3]])


def test_greedy_is_the_lowest_id_among_ties(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_OF_GROUP", 16)
    logits = torch.full((3, 60), -9.0)
    logits[0, [7, 12, 40]] = -3.0
    logits[1, [31, 32, 59]] = -3.0
    logits[2, 16:] = -8.9  # the group of the largest mass, then the one of the largest logit
    logits[2, 3] = -8.8
    tokens, log_z = draw(logits, 0, 0.0)
    assert tokens.tolist() == [7, 31, 3]
    np.testing.assert_allclose(log_z, logits.double().logsumexp(1), rtol=1e-6)  # of T = 1


def test_temperatures_below_the_smallest_fp32_number_are_greedy(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_OF_GROUP", 16)
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    for temperature in (1e-60, 1e-40):
        tokens, log_z = draw(logits, 0, temperature)
        assert torch.equal(tokens, logits.argmax(1))
        assert not log_z.isnan().any()


def test_rows_may_be_those_of_a_wider_tensor():
    wide = torch.randn(3, 192, generator=torch.Generator().manual_seed(3))
    wide[:, 129:] = 1e9
    for found, expected in zip(
        draw(wide[:, :129], 1, 1.0), draw(wide[:, :129].contiguous(), 1, 1.0), strict=True
    ):
        assert torch.equal(found, expected)


def test_the_padding_of_the_weight_is_never_drawn():
    weight = torch.full((50, 16), -100.0)
    weight[49] = -1.0
    launch = module.PROVIDER.build(Problem(2, 16, 50, "fp32"), weight)
    assert launch(torch.ones(2, 16), torch.tensor([1]), torch.tensor([1])).tolist() == [49, 49]
