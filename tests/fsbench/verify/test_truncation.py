"""The checks of filters: an honest sampler passes them, and each planted bug is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_samplers import own_exponential
from tiers import full

from fsbench import reference
from fsbench.errors import UnsupportedProblem
from fsbench.inputs import make_hidden, make_weight
from fsbench.problem import FILTER_ORDER, FILTERS, Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.verify import pathwise, truncation, verify
from fsbench.verify.check import Setting
from fsbench.verify.pathwise import check_on_problem

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32", truncated=True)
JOINT = ("temperature", "top_p", "top_k", "min_p")
LATE = ("min_p", "top_k", "top_p", "temperature")


def kept_of(logits, problem, *, order=FILTER_ORDER, keeps_ties=False, change=None):
    """Return the tokens that the reference keeps; change: filters [B, 3] -> wrong filters."""
    filters = torch.tensor(problem.row_filters(), dtype=torch.float64)
    if change is not None:
        filters = change(filters)
    k, p, min_p = filters.unbind(1)
    return reference.truncate(
        logits, problem.temperature, top_k=k, top_p=p, min_p=min_p, order=order,
        keeps_ties=keeps_ties,
    ).kept  # fmt: skip


def made(keep=kept_of, noise=None, uniform=False, **able) -> Provider:
    """Return a sampler of the softmax over keep(logits, problem), with token noise or torch's.

    uniform: draw all kept tokens with the same probability.
    """

    def build(problem: Problem, weight):
        last_logits = masked = p = torch.empty(0)  # most launches repeat the logits of the last

        def launch(hidden, seed, offset):
            nonlocal last_logits, masked, p
            logits = (hidden @ weight.T).double()
            if not torch.equal(logits, last_logits):
                last_logits = logits
                masked = (logits * (not uniform)).masked_fill(~keep(logits, problem), -torch.inf)
                p = torch.softmax(masked / problem.temperature, 1)
            if noise:
                return reference.expect(masked, seed, offset, problem.temperature).tokens
            return (p / own_exponential(p)).argmax(1)

        return launch

    able = {"filters": FILTERS, "mixed_filters": True, "noise": noise, **able}
    capabilities = Capabilities(("cpu",), ("fp32",), **able)
    return Provider("made_up", "Made up", Kind.TRUNCATED, build, capabilities=capabilities)


@pytest.fixture(autouse=True)
def few_draws(effort, monkeypatch):
    monkeypatch.setattr(truncation, "_SIZES", (64, 250))
    effort("ci", truncated_draws=2**11)
    effort("gate", truncated_draws=2**10, fit_draws=2**12)


def verdict(provider, setting=SETTING, name="truncation"):
    (check,) = verify(provider, setting, "ci", [name])
    return check


@pytest.mark.parametrize("T", [1.0, full(0.3), full(20.0)])
def test_an_honest_sampler_passes(T):
    check = verdict(made(), Setting("cpu", "fp32", T))
    assert check.passed and check.verdict == "ok", check
    assert check.p_value > 1e-3 and check.draws > 50_000


@pytest.mark.parametrize("dtype", ["bf16", full("fp16")])
def test_an_honest_sampler_passes_in_other_dtypes(dtype):
    sampler = made()
    able = replace(sampler.capabilities, dtypes=(dtype,))
    assert verdict(replace(sampler, capabilities=able), Setting("cpu", dtype)).passed


@pytest.mark.parametrize("order", [JOINT, full(LATE)])
def test_a_sampler_is_held_to_the_order_that_it_states(order):
    def keep(logits, problem):
        return kept_of(logits, problem, order=order)

    setting = Setting("cpu", "fp32", 2.0)
    assert verdict(made(keep, filter_order=order), setting).passed
    wrong = verdict(made(keep), setting)
    assert not wrong.passed and "top_p" in wrong.detail


def test_ties_are_checked_as_declared():
    def keep(logits, problem):
        return kept_of(logits, problem, keeps_ties=True)

    assert verdict(made(keep, ties="kept")).passed
    assert verdict(made(keep, ties="any")).passed, "then nothing is asked about ties"
    wrong = verdict(made(keep))
    assert not wrong.passed and "drew token" in wrong.detail and "cut off" in wrong.detail


def only(column, value):
    def change(filters):
        filters = filters.clone()
        filters[:, column] = value(filters[:, column])
        return filters

    return change


WRONG = {
    "one token too many": only(0, lambda k: torch.where(k > 1, k + 1, k)),
    "one token too few": only(0, lambda k: torch.where(k > 1, k - 1, k)),
    "no top-p": only(1, lambda p: torch.ones_like(p)),
    "top-p a little too large": only(1, lambda p: torch.where(p < 1, p + 0.02, p)),
    "top-p a little too small": only(1, lambda p: torch.where(p < 1, p * 0.97, p)),
    "no min-p": only(2, lambda m: torch.zeros_like(m)),
    "min-p of the mean": only(2, lambda m: 0.7 * m),
    "filters of the row before": lambda filters: filters.roll(1, 0),
    "filters of the first row": lambda filters: filters[:1].expand_as(filters),
}


@pytest.mark.parametrize("bug", WRONG)
def test_a_bug_is_found(bug):
    check = verdict(made(lambda logits, problem: kept_of(logits, problem, change=WRONG[bug])))
    assert not check.passed, bug


def test_a_nucleus_without_the_token_that_crosses_p_is_found():
    def keep(logits, problem):
        kept = kept_of(logits, problem)
        ranked = logits.masked_fill(~kept, -torch.inf)
        p = torch.tensor(problem.row_filters())[:, 1:2]
        last = (ranked == ranked.masked_fill(~kept, torch.inf).amin(1, keepdim=True)) & kept
        return torch.where((p < 1) & (kept.sum(1, keepdim=True) > 1), kept & ~last, kept)

    assert not verdict(made(keep)).passed


def test_probabilities_that_are_not_those_of_the_softmax_are_found():
    assert not verdict(made(uniform=True)).passed


def test_a_sampler_without_filters_cannot_be_checked():
    with pytest.raises(UnsupportedProblem, match="takes none of the filters"):
        verdict(replace(made(), supports=lambda problem: "no filters of ours"))


def test_tokens_are_compared_with_the_oracle():
    check = verdict(made(noise="token"), name="truncated oracle")
    assert check.passed and check.draws > 250, check
    change = WRONG["one token too few"]
    wrong = made(lambda *arguments: kept_of(*arguments, change=change), noise="token")
    assert not verdict(wrong, name="truncated oracle").passed


@pytest.mark.full
def test_the_gate_asks_about_filters_only_where_they_are_on():
    names = [check.name for check in verify(made(noise="token"), SETTING)]
    assert names[-2:] == ["truncated oracle", "truncation"] and "fit" in names
    assert "truncation" not in [
        check.name for check in verify(made(noise="token"), Setting("cpu", "fp32"))
    ]


@pytest.mark.parametrize("noise", [None, "token"])
def test_a_timed_launch_is_checked_with_its_penalties(noise):
    problem = Problem(8, 32, 400, "fp32", 1.0, "cpu", top_k=2, repetition_penalty=9.0, history=900)
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    honest = made(noise=noise)
    logits, _ = pathwise.penalized(problem, hidden @ weight.T)
    assert (logits != hidden @ weight.T).any(1).all()
    other_head = torch.linalg.lstsq(hidden.double(), logits.double()).solution.T.float()
    launch = honest.build(problem, other_head)  # has the penalized logits
    assert check_on_problem(honest, problem, launch, hidden, weight).passed
    forgetful = honest.build(problem, weight)
    assert not check_on_problem(honest, problem, forgetful, hidden, weight).passed


@pytest.mark.parametrize("noise", [None, "token"])
def test_a_timed_launch_is_checked_with_its_filters(noise):
    problem = Problem(8, 32, 400, "fp32", 1.0, "cpu", top_k=5, top_p=0.9, mixed=True)
    hidden, weight = make_hidden(problem, 0), make_weight(problem, 0)
    honest = made(noise=noise)
    launch = honest.build(problem, weight)
    assert check_on_problem(honest, problem, launch, hidden, weight).passed
    unfiltered = honest.build(replace(problem, top_k=0, top_p=1.0, mixed=False), weight)
    assert not check_on_problem(honest, problem, unfiltered, hidden, weight).passed
