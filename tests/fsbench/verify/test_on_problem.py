"""`check_on_problem`: the launch that is about to be timed is checked on its inputs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_samplers import BIASED, Step, greedy, honest, second_best, token_noise
from planted_samplers import stepped as provider

from fsbench import inputs
from fsbench.errors import VerificationFailed
from fsbench.problem import Problem
from fsbench.provider import Kind
from fsbench.verify import pathwise, verify
from fsbench.verify.check import ALPHA, Check, Setting
from fsbench.verify.pathwise import check_on_problem
from fsbench.verify.statistics import surprisal_p_value

pytestmark = pytest.mark.usefixtures("one_thread")


def _on_problem(
    step: Step, dtype: str = "bf16", T: float = 0.7, distribution="normal:1", **able
) -> Check:
    problem = Problem(16, 64, 1000, dtype, T, "cpu", distribution)
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    made = provider(step, **able)
    return check_on_problem(made, problem, made.build(problem, weight), hidden, weight)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_on_the_problem_rounding_of_stored_logits_is_allowed(dtype):
    check = _on_problem(token_noise(), dtype, noise="token")
    assert check.passed, check
    assert _on_problem(greedy, dtype, kind=Kind.GREEDY).passed
    assert _on_problem(honest, dtype).passed


def test_on_the_problem_wrong_tokens_are_found():
    assert not _on_problem(honest, noise="token").passed
    assert not _on_problem(token_noise(rows=torch.zeros_like), noise="token").passed
    assert not _on_problem(second_best, kind=Kind.GREEDY).passed
    assert not _on_problem(lambda *a: honest(*a) + 1000).passed
    assert not _on_problem(negative_ids_always).passed


def negative_ids_always(logits, T, seed, offset):
    return torch.full((len(logits),), -1)


@pytest.mark.parametrize(
    "distribution", ["normal:0", "normal:1", "normal:64", "zipf:2", "peaked:20"]
)
@pytest.mark.parametrize("T", [0.3, 10.0])
def test_on_the_problem_honest_draws_of_any_distribution_pass(distribution, T):
    for seed in range(3):
        torch.manual_seed(seed)
        assert _on_problem(honest, T=T, distribution=distribution).passed


@pytest.mark.parametrize(
    "mistake",
    ["shifted by one", "greedy", "uniform", "always the same token", "noise sign flipped"],
)
def test_on_the_problem_draws_from_another_distribution_are_found(mistake):
    torch.manual_seed(0)
    check = _on_problem(BIASED[mistake], T=0.5)
    assert not check.passed and check.p_value < ALPHA


def test_on_the_problem_temperature_zero_is_greedy():
    assert _on_problem(greedy, T=0.0).passed
    assert not _on_problem(second_best, T=0.0).passed


def test_on_the_problem_one_row_is_drawn_often_enough(monkeypatch):
    """At B = 1 a step is one draw."""
    monkeypatch.setitem(pathwise._PROBLEM_STEPS, "cpu", 64)
    problem = Problem(1, 64, 1000, "fp32", 0.5, "cpu")
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    for step, passes in ((honest, True), (BIASED["uniform"], False)):
        made = provider(step)
        torch.manual_seed(0)
        check = check_on_problem(made, problem, made.build(problem, weight), hidden, weight)
        assert (check.passed, check.draws) == (passes, 64)


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_surprisal_p_values_are_never_too_small(scale):
    """At most a share x of honest draws may have a p-value below x; Chernoff's bound has slack."""
    generator = torch.Generator().manual_seed(0)
    logp = torch.log_softmax(scale * torch.randn(4, 50, generator=generator), 1)
    p_values = np.array(
        [
            surprisal_p_value(torch.multinomial(logp.exp(), 8, True, generator=generator).T, logp)
            for _ in range(200)
        ]
    )
    for x in (0.5, 0.1, 0.02):
        assert np.mean(p_values <= x) <= x
    assert p_values.max() == 1.0


def test_surprisal_allows_for_a_known_deviation():
    """One draw in 64 of a token that is never drawn honestly: FI1's last token in bf16."""
    logp = torch.log_softmax(torch.tensor([[30.0, 0.0]]), 1)
    tokens = torch.zeros(64, 1, dtype=torch.int64)
    tokens[5] = 1
    assert surprisal_p_value(tokens, logp) < ALPHA
    assert surprisal_p_value(tokens, logp, known_deviation=0.004) > 0.1
    assert surprisal_p_value(tokens.flip(1) * 0 + 1, logp, known_deviation=0.004) < ALPHA


def test_surprisal_allows_for_errors_of_the_logits():
    logp = torch.log_softmax(torch.linspace(-4, 4, 100).expand(8, -1), 1)
    unlikely = torch.full((8, 8), 20)
    assert surprisal_p_value(unlikely, logp) < 1e-12
    assert surprisal_p_value(unlikely, logp, error=0.1) < ALPHA
    assert surprisal_p_value(unlikely, logp, error=3.0) == 1.0


@pytest.mark.parametrize(
    "form",
    [
        lambda tokens: tokens[:, None],
        lambda tokens: tokens[:-1],
        lambda tokens: tokens.float(),
        lambda tokens: tokens.to(torch.int16),
    ],
)
def test_tokens_of_the_wrong_form_are_found_everywhere(form):
    def step(*arguments):
        return form(greedy(*arguments))

    with pytest.raises(VerificationFailed, match="tokens: expected int32 or int64 of shape"):
        _on_problem(step)
    for check in verify(provider(step, noise="token"), Setting("cpu", "fp32", 0.7)):
        assert not check.passed and "tokens: expected" in check.detail, check
