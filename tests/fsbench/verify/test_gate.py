"""The checks themselves are checked: honest samplers pass, planted bugs do not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fsbench import inputs, reference
from fsbench.errors import ProviderUnavailable, UnsupportedProblem, VerificationFailed
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.verify import battery, pathwise, verify
from fsbench.verify.check import ALPHA, FAMILY, MOST_CHECKS, Check, Setting
from fsbench.verify.pathwise import (
    check_on_problem,
    check_oracle,
    check_undefined_rows,
    surprisal_p_value,
)
from fsbench.verify.statistics import MIN_EXPECTED, detectable_bias, goodness_of_fit
from fsbench.verify.support import check_greedy

pytestmark = pytest.mark.usefixtures("one_thread")

DRAWS = 2**15


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setitem(battery.GATE_DRAWS, "cpu", DRAWS)


def fit(made: Provider, setting: Setting) -> Check:
    """The gate's goodness of fit."""
    (check,) = verify(made, setting, only=["fit"])
    return check


SETTING = Setting("cpu", "fp32", 0.7)  # a temperature whose neglect shows

Step = Callable[[Tensor, float, Tensor, Tensor], Tensor]
"""(logits [B, V] fp32, temperature, seed, offset) -> tokens [B]."""


def provider(step: Step, kind: Kind = Kind.EXACT, fused: bool = False, **able) -> Provider:
    def build(problem: Problem, weight: Tensor):
        def launch(hidden, seed, offset):
            return step((hidden @ weight.T).float(), problem.temperature, seed, offset)

        return launch

    able = {"zero_temperature": True, "fused": fused, **able}
    capabilities = Capabilities(("cpu",), ("bf16", "fp16", "fp32"), **able)
    return Provider("made_up", "Made up", kind, build, capabilities=capabilities)


# Samplers with noise of their own


def gumbel(logits: Tensor) -> Tensor:
    return -torch.empty_like(logits).exponential_().log()


def honest(logits, T, seed, offset):
    return (logits + T * gumbel(logits)).argmax(1)


def temperature_ignored(logits, T, seed, offset):
    return (logits + gumbel(logits)).argmax(1)


def temperature_squared(logits, T, seed, offset):
    return (logits + T * T * gumbel(logits)).argmax(1)


def noise_sign_flipped(logits, T, seed, offset):
    return (logits - T * gumbel(logits)).argmax(1)


def last_token_never_drawn(logits, T, seed, offset):
    return honest(logits[:, :-1], T, seed, offset) if logits.shape[1] > 1 else logits.argmax(1)


def first_token_never_drawn(logits, T, seed, offset):
    if logits.shape[1] == 1:
        return logits.argmax(1)
    return honest(logits[:, 1:], T, seed, offset) + 1


def shifted_by_one(logits, T, seed, offset):
    return (honest(logits, T, seed, offset) + 1) % logits.shape[1]


def outside_the_vocabulary(logits, T, seed, offset):
    tokens = honest(logits, T, seed, offset)
    return torch.where(tokens == 0, logits.shape[1], tokens)


def negative_ids(logits, T, seed, offset):
    tokens = honest(logits, T, seed, offset)
    return torch.where(tokens == 0, -1, tokens)


def always_the_same_token(logits, T, seed, offset):
    return torch.full((logits.shape[0],), 3 % logits.shape[1])


def greedy(logits, T, seed, offset):
    return logits.argmax(1)


def uniform(logits, T, seed, offset):
    return torch.randint(logits.shape[1], (logits.shape[0],))


def rows_share_the_noise(logits, T, seed, offset):
    return (logits + T * gumbel(logits[:1])).argmax(1)


def steps_share_the_noise(logits, T, seed, offset):
    generator = torch.Generator().manual_seed(5)
    noise = -torch.empty_like(logits).exponential_(generator=generator).log()
    return (logits + T * noise).argmax(1)


def padding_has_logit_zero(logits, T, seed, offset):
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % 64))
    return honest(padded, T, seed, offset).clamp_max(logits.shape[1] - 1)


def noise_capped(logits, T, seed, offset):
    return (logits + T * gumbel(logits).clamp_max(5)).argmax(1)


def rare_tokens_left_out(logits, T, seed, offset):
    """Top-p 0.9: what filters do."""
    p, order = (logits / T).softmax(1).sort(1, descending=True)
    dropped = (p.cumsum(1) - p > 0.9).gather(1, order.argsort(1))
    return honest(logits.masked_fill(dropped, -torch.inf), T, seed, offset)


BIASED = [
    temperature_ignored,
    temperature_squared,
    noise_sign_flipped,
    last_token_never_drawn,
    first_token_never_drawn,
    shifted_by_one,
    outside_the_vocabulary,
    negative_ids,
    always_the_same_token,
    greedy,
    uniform,
    rows_share_the_noise,
    steps_share_the_noise,
    padding_has_logit_zero,
    noise_capped,
    rare_tokens_left_out,
]


@pytest.mark.parametrize("step", BIASED, ids=lambda step: step.__name__)
def test_fit_rejects(step):
    check = fit(provider(step), SETTING)
    assert not check.passed, check


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("temperature", [1e-6, 0.05, 1.0, 3000.0])
def test_fit_accepts_an_honest_sampler_at_any_temperature(dtype, temperature):
    check = fit(provider(honest), Setting("cpu", dtype, temperature))
    assert check.passed, check
    assert check.p_value > 1e-3 and check.detects.endswith("rms error of probabilities")
    assert check.draws == DRAWS


def test_a_known_deviation_is_tolerated_up_to_its_size():
    """As FI1 in bf16: some mass falls on the last token; verify says so and lets it pass."""
    p = np.full(500, 1 / 500)
    n = 2**20

    def counts_with(moved: float) -> np.ndarray:
        drawn = p * (1 - moved)
        drawn[-1] += moved
        return np.random.default_rng(1).multinomial(n, drawn)

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


def token_noise(**mistakes) -> Step:
    """The documented noise, or with a mistake: what to compute in place of an argument of it."""
    replace = {"seed": int, "offset": int, "scale": lambda T: T, **mistakes}

    def step(logits, T, seed, offset):
        rows = torch.arange(len(logits))
        if "rows" in mistakes:
            rows = replace["rows"](rows)
        seed = torch.tensor([replace["seed"](seed)])
        offset = torch.tensor([replace["offset"](offset)])
        noise = reference.token_noise(logits.shape[1], seed, offset, rows)
        if "noise" in mistakes:
            noise = replace["noise"](noise)
        return (logits.double() + replace["scale"](T) * noise).argmax(1)

    return step


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_oracle_accepts_itself(dtype):
    check = check_oracle(provider(token_noise(), noise="token"), Setting("cpu", dtype, 0.7))
    assert check.passed, check
    assert check.draws == 309


MISTAKES = {
    "seed cut to 32 bits": {"seed": lambda seed: int(seed) & 0xFFFFFFFF},
    "sign of the seed lost": {"seed": lambda seed: int(seed) & (2**63 - 1)},
    "offset cut to 31 bits": {"offset": lambda offset: int(offset) & 0x7FFFFFFF},
    "offset ignored": {"offset": lambda offset: 0},
    "offset one ahead": {"offset": lambda offset: int(offset) + 1},
    "row ignored": {"rows": torch.zeros_like},
    "rows reversed": {"rows": lambda rows: rows.flip(0)},
    "lanes permuted": {"noise": lambda noise: noise.roll(1, 1)},
    "sign": {"noise": lambda noise: -noise},
    "temperature ignored": {"scale": lambda T: 1.0},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_oracle_rejects(mistake):
    check = check_oracle(provider(token_noise(**MISTAKES[mistake])), SETTING)
    assert not check.passed
    assert "expected token" in check.detail


@pytest.mark.parametrize("step", [honest, *BIASED], ids=lambda step: step.__name__)
def test_the_oracle_rejects_other_noise(step):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert not check_oracle(provider(step), SETTING).passed


def test_undefined_rows():
    def defined(logits, T, seed, offset):
        expected = reference.expect(logits, seed, offset, T)
        return expected.tokens

    def neighbours_disturbed(logits, T, seed, offset):
        return torch.where((defined(logits, T, seed, offset) < 0).any(), -1, defined(
            logits, T, seed, offset
        ))  # fmt: skip

    def maximum_of_what_there_is(logits, T, seed, offset):
        return logits.nan_to_num(nan=-1e30, neginf=-1e30).argmax(1)

    assert check_undefined_rows(provider(defined), SETTING).passed
    for wrong in (neighbours_disturbed, maximum_of_what_there_is, token_noise()):
        assert not check_undefined_rows(provider(wrong), SETTING).passed


# Greedy


def second_best(logits, T, seed, offset):
    return logits.topk(min(2, logits.shape[1]), 1).indices[:, -1]


def padding_wins_over_negative_logits(logits, T, seed, offset):
    padded = torch.nn.functional.pad(logits, (0, -logits.shape[1] % 64))
    return padded.argmax(1).clamp_max(logits.shape[1] - 1)


def last_token_unseen(logits, T, seed, offset):
    return logits[:, : max(1, logits.shape[1] - 1)].argmax(1)


def first_token_unseen(logits, T, seed, offset):
    return logits.argmax(1) if logits.shape[1] == 1 else logits[:, 1:].argmax(1) + 1


def last_of_many_unseen(logits, T, seed, offset):
    """A partial tile that ends one token early."""
    return logits[:, : -1 if logits.shape[1] > 128 else None].argmax(1)


def first_of_many_unseen(logits, T, seed, offset):
    return logits[:, 1:].argmax(1) + 1 if logits.shape[1] > 128 else logits.argmax(1)


def rows_beyond_16_lost(logits, T, seed, offset):
    return logits.argmax(1).where(torch.arange(len(logits)) < 16, 0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_greedy_accepts_argmax(dtype):
    check = check_greedy(provider(greedy, Kind.GREEDY), Setting("cpu", dtype))
    assert check.passed and check.draws == 206


@pytest.mark.parametrize(
    "step",
    [
        second_best,
        padding_wins_over_negative_logits,
        last_token_unseen,
        first_token_unseen,
        last_of_many_unseen,
        first_of_many_unseen,
        rows_beyond_16_lost,
        shifted_by_one,
        outside_the_vocabulary,
        always_the_same_token,
        temperature_ignored,
    ],
    ids=lambda step: step.__name__,
)
def test_greedy_rejects(step):
    assert not check_greedy(provider(step, Kind.GREEDY), Setting("cpu", "fp32")).passed


# The launch that is about to be timed


def _on_problem(step: Step, dtype: str = "bf16", T: float = 0.7, law="normal:1", **able) -> Check:
    problem = Problem(16, 64, 1000, dtype, T, "cpu", law)
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


@pytest.mark.parametrize("law", ["normal:0", "normal:1", "normal:64", "zipf:2", "peaked:20"])
@pytest.mark.parametrize("T", [0.3, 1.0, 10.0])
def test_on_the_problem_honest_draws_pass_whatever_the_law(law, T):
    for seed in range(5):
        torch.manual_seed(seed)
        assert _on_problem(honest, T=T, law=law).passed


@pytest.mark.parametrize(
    "step",
    [shifted_by_one, greedy, uniform, always_the_same_token, noise_sign_flipped],
    ids=lambda step: step.__name__,
)
def test_on_the_problem_draws_from_another_law_are_found(step):
    torch.manual_seed(0)
    check = _on_problem(step, T=0.5)
    assert not check.passed and check.p_value < ALPHA


def test_on_the_problem_temperature_zero_is_greedy():
    assert _on_problem(greedy, T=0.0).passed
    assert not _on_problem(second_best, T=0.0).passed


def test_on_the_problem_one_row_is_drawn_often_enough(monkeypatch):
    """At B = 1 a step is one draw."""
    monkeypatch.setitem(pathwise._PROBLEM_STEPS, "cpu", 64)
    problem = Problem(1, 64, 1000, "fp32", 0.5, "cpu")
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    for step, passes in ((honest, True), (uniform, False)):
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
            for _ in range(400)
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
    for check in verify(provider(step, noise="token"), SETTING):
        assert not check.passed and "tokens: expected" in check.detail, check


# Which checks apply


def test_verify_runs_the_checks_that_apply(monkeypatch):
    monkeypatch.setitem(battery.GATE_DRAWS, "cpu", 2**12)

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
def test_what_says_nothing_about_the_sampler_is_raised(error):
    def refuse(logits, T, seed, offset):
        raise error

    with pytest.raises(type(error)):
        list(verify(provider(refuse), SETTING))


@pytest.mark.parametrize(
    "check",
    [
        check_oracle,
        check_greedy,
        check_undefined_rows,
        fit,
    ],
)
def test_a_check_that_cannot_run_does_not_pass(check):
    made = provider(honest)
    object.__setattr__(made, "supports", lambda problem: "V must be 120832")
    with pytest.raises(UnsupportedProblem, match="V must be 120832"):
        check(made, SETTING)


# The statistics


def _law(size: int, seed: int = 0) -> np.ndarray:
    p = np.exp(2 * np.random.default_rng(seed).standard_normal(size))
    return p / p.sum()


def test_an_honest_sampler_is_accepted_over_200_seeds():
    p = _law(500)
    results = [
        goodness_of_fit(np.random.default_rng(seed).multinomial(2**14, p), p) for seed in range(200)
    ]
    assert all(check.passed for check in results)
    # And its p-values are about uniform, so that ALPHA means what it says.
    p_values = np.array([check.p_value for check in results])
    assert p_values.mean() == pytest.approx(0.5, abs=0.08)
    assert 0 < (p_values < 0.05).sum() < 25


def test_rare_tokens_are_pooled_not_dropped():
    """A sampler that sends a tenth of its draws to tokens too rare for a bin of their own."""
    p = np.concatenate([np.full(10, 0.09999), np.full(1000, 0.0001 / 1000)])
    q = np.concatenate([np.full(10, 0.09), np.full(1000, 0.1 / 1000)])
    counts = np.random.default_rng(0).multinomial(10_000, q)
    assert not goodness_of_fit(counts, p / p.sum()).passed


def test_bins_hold_enough_draws(monkeypatch):
    p = _law(2000)
    counts = np.random.default_rng(0).multinomial(2**14, p)
    check = goodness_of_fit(counts, p)
    bins = int(check.detail.split(" over ")[1].split()[0])
    assert 2 <= bins <= 2**14 / MIN_EXPECTED


def test_too_few_draws_to_test_anything_do_not_pass():
    with pytest.raises(VerificationFailed, match="expected two bins"):
        goodness_of_fit(np.array([30, 0]), np.array([0.9, 0.1]))


def test_detectable_bias_is_what_a_simulation_finds_with_probability_09():
    bins, draws = 40, 2**14
    bias = detectable_bias(bins - 1, draws)
    p = np.full(bins, 1 / bins)
    q = p * (1 + bias * np.where(np.arange(bins) % 2, 1, -1))  # rms relative error: bias
    generator = np.random.default_rng(0)
    found = [not goodness_of_fit(generator.multinomial(draws, q), p).passed for _ in range(400)]
    assert np.mean(found) == pytest.approx(0.9, abs=0.05)


def test_detectable_bias_shrinks_with_the_root_of_the_draws():
    assert detectable_bias(100, 4 * 10**6) == pytest.approx(detectable_bias(100, 10**6) / 2)
    assert detectable_bias(10, 10**6) < detectable_bias(100, 10**6)


def test_one_battery_in_a_million_is_wrong():
    assert FAMILY == 1e-6 == pytest.approx(MOST_CHECKS * ALPHA)
