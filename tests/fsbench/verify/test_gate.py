"""The checks of the gate: correct samplers pass, planted bugs do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from planted_samplers import BIASED, NOT_GREEDY, greedy, honest, token_noise
from planted_samplers import stepped as provider

from fsbench import reference
from fsbench.errors import ProviderUnavailable, UnsupportedProblem
from fsbench.provider import Kind, Provider
from fsbench.verify import verify
from fsbench.verify.check import Check, Setting
from fsbench.verify.statistics import goodness_of_fit

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 2**14
SETTING = Setting("cpu", "fp32", 0.7)  # a temperature whose neglect shows


@pytest.fixture(autouse=True)
def few_draws(effort):
    effort("gate", fit_draws=DRAWS)


def gate(made: Provider, name: str, setting: Setting = SETTING) -> Check:
    """One check of the gate."""
    (check,) = verify(made, setting, only=[name])
    return check


def fit(made: Provider, setting: Setting) -> Check:
    return gate(made, "fit", setting)


# Samplers with other noise than the contract's


@pytest.mark.parametrize("mistake", BIASED)
def test_fit_rejects(mistake):
    check = fit(provider(BIASED[mistake]), SETTING)
    assert not check.passed, check


@pytest.mark.parametrize(
    ("dtype", "temperature"),
    [("fp32", 1e-6), ("bf16", 0.05), ("fp16", 1e-6), ("bf16", 3000.0), ("fp16", 3000.0)],
)
def test_fit_accepts_an_honest_sampler_at_any_temperature(dtype, temperature):
    check = fit(provider(honest), Setting("cpu", dtype, temperature))
    assert check.passed, check
    assert check.p_value > 1e-3 and check.detects.endswith("rms error of probabilities")
    assert DRAWS <= check.draws < DRAWS + 300, "in whole launches"


def test_a_known_deviation_is_tolerated_up_to_its_size():
    """As FI1 in bf16: some mass falls on the last token; verify says so and lets it pass."""
    p = np.full(500, 1 / 500)
    n = 2**20

    def counts_with(deviation: float) -> np.ndarray:
        biased = p * (1 - deviation)
        biased[-1] += deviation
        return np.random.default_rng(1).multinomial(n, biased)

    assert not goodness_of_fit(counts_with(0.002), p).passed
    tolerated = goodness_of_fit(counts_with(0.002), p, known_deviation=0.004)
    assert tolerated.passed and tolerated.verdict == "not exact"
    assert not goodness_of_fit(counts_with(0.02), p, known_deviation=0.004).passed
    assert goodness_of_fit(counts_with(0.0), p, known_deviation=0.004).verdict == "ok"


def test_fit_at_temperature_zero_is_the_fit_at_one():
    check = fit(provider(honest), Setting("cpu", "fp32", 0.0))
    assert check.passed, check
    at_one = provider(lambda logits, T, seed, offset: honest(logits, 1.0, seed, offset))
    assert fit(at_one, Setting("cpu", "fp32", 0.0)).passed


# Token noise


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_oracle_accepts_itself(dtype):
    check = gate(provider(token_noise(), noise="token"), "oracle", Setting("cpu", dtype, 0.7))
    assert check.passed, check
    assert check.draws == 309


MISTAKES = {
    "seed cut to 32 bits": {"seed": lambda seed: int(seed) & 0xFFFFFFFF},
    "sign of the seed lost": {"seed": lambda seed: int(seed) & (2**63 - 1)},
    "offset ignored": {"offset": lambda offset: 0},
    "row ignored": {"rows": torch.zeros_like},
    "rows reversed": {"rows": lambda rows: rows.flip(0)},
    "lanes permuted": {"noise": lambda noise: noise.roll(1, 1)},
    "sign": {"noise": lambda noise: -noise},
    "temperature ignored": {"scale": lambda T: 1.0},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_oracle_rejects(mistake):
    check = gate(provider(token_noise(**MISTAKES[mistake]), noise="token"), "oracle")
    assert not check.passed
    assert "expected token" in check.detail


def test_the_oracle_rejects_other_noise():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for step in (honest, *BIASED.values()):
            assert not gate(provider(step, noise="token"), "oracle").passed


def test_undefined_rows():
    def defined(logits, T, seed, offset):
        expected = reference.expect(logits, seed, offset, T)
        return expected.tokens

    def neighbors_disturbed(logits, T, seed, offset):
        return torch.where((defined(logits, T, seed, offset) < 0).any(), -1, defined(
            logits, T, seed, offset
        ))  # fmt: skip

    def maximum_of_what_there_is(logits, T, seed, offset):
        return logits.nan_to_num(nan=-1e30, neginf=-1e30).argmax(1)

    assert gate(provider(defined, noise="token"), "undefined rows").passed
    for wrong in (neighbors_disturbed, maximum_of_what_there_is, token_noise()):
        assert not gate(provider(wrong, noise="token"), "undefined rows").passed


# Greedy


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_greedy_accepts_argmax(dtype):
    check = gate(provider(greedy, Kind.GREEDY), "greedy", Setting("cpu", dtype))
    assert check.passed and check.draws == 206


@pytest.mark.parametrize("mistake", NOT_GREEDY)
def test_greedy_rejects(mistake):
    sampler = provider(NOT_GREEDY[mistake], Kind.GREEDY)
    assert not gate(sampler, "greedy", Setting("cpu", "fp32")).passed


# Which checks apply


def test_verify_runs_the_checks_that_apply(effort):
    effort("gate", fit_draws=2**12)

    def names(made: Provider) -> list[str]:
        return [check.name for check in verify(made, SETTING)]

    token = provider(token_noise(), noise="token")
    assert names(token) == ["oracle", "undefined rows", "greedy", "fit"]
    assert names(provider(honest, zero_temperature=False)) == ["fit"]
    assert names(provider(honest)) == ["greedy", "fit"]
    assert names(provider(greedy, Kind.GREEDY)) == ["greedy"]
    assert names(provider(greedy, Kind.LOWER_BOUND)) == []


def test_a_crash_is_a_failed_check_and_the_others_still_run():
    def crash(logits, T, seed, offset):
        raise ValueError("a\nb")

    results = list(verify(provider(crash), SETTING))
    assert [(check.name, check.passed, check.detail) for check in results] == [
        ("greedy", False, "ValueError: a b"),
        ("fit", False, "ValueError: a b"),
    ]


@pytest.mark.parametrize(
    "error", [UnsupportedProblem("x"), ProviderUnavailable("x"), MemoryError("x")]
)
def test_errors_that_do_not_concern_the_sampler_are_raised(error):
    def refuse(logits, T, seed, offset):
        raise error

    with pytest.raises(type(error)):
        list(verify(provider(refuse), SETTING))


@pytest.mark.parametrize("name", ["oracle", "greedy", "undefined rows", "fit"])
def test_a_check_that_cannot_run_does_not_pass(name):
    made = provider(honest, noise="token")
    object.__setattr__(made, "supports", lambda problem: "V must be 120832")
    with pytest.raises(UnsupportedProblem, match="V must be 120832"):
        gate(made, name)
