"""Log-probabilities against float64: planted mistakes are found, honest scores pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_calls import honest_score, scorer, token_scores

from fsbench import inputs
from fsbench.errors import VerificationFailed
from fsbench.kernels import flash_score
from fsbench.problem import Problem
from fsbench.provider import Provider
from fsbench.verify import verify
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import check_on_problem

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32", 0.7)


def chunks_overlap(logits, T, targets):
    """Score rows from 16 on with the logits of the previous chunk."""
    return honest_score(logits[torch.arange(len(logits)) % 16], T, targets)


WRONG = {
    "without T": lambda y, T, t: honest_score(y, 1.0, t),
    "in bits": lambda y, T, t: honest_score(y, T, t) / 0.6931,
    "0.1 % off": lambda y, T, t: 1.001 * honest_score(y, T, t),
    "the next target": lambda y, T, t: honest_score(y, T, (t + 1) % y.shape[1]),
    "log Z without the last token": lambda y, T, t: (
        y.gather(1, t[:, None])[:, 0] / T - (y[:, : max(1, y.shape[1] - 1)] / T).logsumexp(1)
    ),
    "another chunk's rows": chunks_overlap,
    "NaN": lambda y, T, t: honest_score(y, T, t) * torch.nan,
}


CAPABILITIES = ("per_row_temperature", "greedy_rows", "mask", "logprob", "entropy", "rank")


def full_call(scores_of=token_scores, **mistakes) -> Provider:
    """Return a score that also has a full call. scores_of: (logits, targets, T) -> result."""

    def score(hidden, weight, targets, *, temperature, mask, return_entropy, return_rank):
        logits = (hidden @ weight.T).masked_fill(~mask, -torch.inf)
        return scores_of(logits, targets, temperature, **mistakes)

    able = replace(scorer().capabilities, **dict.fromkeys(CAPABILITIES, True))
    return replace(scorer(), capabilities=able, score=score)


def without_rank(*arguments):
    result = token_scores(*arguments)
    del result.rank
    return result


def infinities_capped(*arguments):
    result = token_scores(*arguments)
    result.logprob.clamp_min_(-1e4)
    return result


WRONG_CALLS = {
    "log-probability: row": full_call(scored=lambda inverse: torch.ones_like(inverse)),
    "log-probability: row 0: expected -inf (float64 reference), got -10000 (sampler)": full_call(
        infinities_capped
    ),
    "entropy: row": full_call(entropy=lambda H: 1.001 * H),
    "rank: row": full_call(above=torch.ge),
    "returned no rank of shape": full_call(without_rank),
}


def test_an_honest_full_call_passes_and_the_gate_does_not_ask_it():
    (check,) = verify(full_call(), SETTING, "ci")
    assert check.passed, check
    assert checked(WRONG_CALLS["rank: row"]).passed


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_a_wrong_full_call_is_found(message):
    (check,) = verify(WRONG_CALLS[message], SETTING, "ci")
    assert not check.passed and message in check.detail, check


@pytest.mark.interpreter
def test_the_kernels_score_passes_the_whole_check(effort):
    effort("ci", any_shapes=((3, 2), (17, 127)), filtered=(20, 200))
    made = flash_score.PROVIDER
    made = replace(made, capabilities=replace(made.capabilities, devices=("cpu",)))
    (check,) = verify(made, Setting("cpu", "fp16", 0.5), "ci")
    assert check.passed, check


def checked(provider: Provider, dtype: str = "fp32"):
    (check,) = verify(provider, replace(SETTING, dtype=dtype))
    assert check.name == "score"
    return check


def on_problem(provider: Provider, dtype: str = "fp32", B: int = 40):
    problem = Problem(B, 64, 1000, dtype, 0.7, "cpu")
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    return check_on_problem(provider, problem, provider.build(problem, weight), hidden, weight)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_honest_score_passes_and_its_error_is_reported(dtype):
    for check in (checked(scorer(), dtype), on_problem(scorer(), dtype, 300)):
        assert check.passed and "log-probabilities within" in check.detail, check


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_score_is_found_on_exact_logits(mistake):
    check = checked(scorer(WRONG[mistake]))
    assert not check.passed and "log-probability: row" in check.detail, check


def test_a_temperature_that_is_ignored_is_found_where_the_first_is_1():
    setting = replace(SETTING, temperature=1.0, second=0.5)
    (check,) = verify(scorer(WRONG["without T"]), setting, "ci")
    assert not check.passed and "T=0.5" in check.detail, check
    at_1 = replace(
        scorer(), supports=lambda problem: None if problem.temperature == 1 else "T = 1 only"
    )
    (check,) = verify(at_1, setting, "ci")
    assert check.passed, check


@pytest.mark.parametrize("mistake", [x for x in WRONG if x != "log Z without the last token"])
def test_a_wrong_score_is_found_on_the_problem(mistake):
    with pytest.raises(VerificationFailed, match=r"log-probability: row \d+: expected .* off by"):
        on_problem(scorer(WRONG[mistake]))


def test_rounded_logits_are_refused_of_a_score_that_claims_to_be_fused():
    with pytest.raises(VerificationFailed, match="off by"):
        on_problem(scorer(fused=True), "bf16")


@pytest.mark.parametrize("change", [lambda x: x.double(), lambda x: x[:, None]])
def test_another_form_is_refused(change):
    check = checked(scorer(lambda *arguments: change(honest_score(*arguments))))
    assert not check.passed and "expected torch.float32 of shape" in check.detail


def test_targets_are_tokens_with_the_last_among_them():
    for B, V in ((1, 1), (3, 2), (300, 50), (16384, 151936)):
        targets = Problem(B, 1, V).row_targets()
        assert len(targets) == B and targets[0] == V - 1
        assert min(targets) >= 0 and len(set(targets)) == min(B, V)
