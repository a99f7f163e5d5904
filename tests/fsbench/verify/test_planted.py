"""Bugs that earlier batteries let pass, and bugs of public issues: found, by the check named."""

from __future__ import annotations

import numpy as np
import planted_bugs as bugs
import pytest
import torch
from tiers import full

from fsbench.verify import battery, joint, verify
from fsbench.verify.check import ALPHA, Check, Setting, conclusion
from fsbench.verify.drawing import Draws
from fsbench.verify.effort import EFFORTS
from fsbench.verify.statistics import coverage

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32", 1.0, second=0.5)  # as `fsbench verify` has it

HONEST = {"launch": bugs.planted(), "filters": bugs.filtered(), "full call": bugs.complete()}
OF_FILTERS = ("truncation", "truncated draws")


@pytest.fixture(autouse=True)
def fewer_tokens(effort):
    effort("ci", vocabulary=2051)


def judged(sampler, *only):
    return list(verify(sampler, SETTING, "ci", only))


@pytest.mark.parametrize("bug", [*bugs.SURVIVORS, *bugs.FIELD])
def test_it_is_found(bug):
    sampler, name = {**bugs.SURVIVORS, **bugs.FIELD}[bug]
    (check,) = judged(sampler, name)
    assert not check.passed and "Error" not in check.detail, check


@pytest.mark.parametrize("bit", [1, *map(full, (2, 4, 16, 32, 64)), 128])
def test_no_exchange_of_rows_keeps_the_pattern_of_temperatures(bit):
    (check,) = judged(bugs.complete(temperature=bugs.of_row_xor(bit)), "call")
    assert not check.passed and "Error" not in check.detail, check


@pytest.mark.full
@pytest.mark.parametrize("bug", bugs.RARE)
def test_a_rare_one_is_found_with_the_draws_of_a_gpu(bug, effort):
    draws = EFFORTS["ci", "cuda"].block_draws
    assert draws == EFFORTS["full", "cpu"].block_draws
    sampler, name = bugs.RARE[bug]
    assert judged(sampler, name)[0].passed, "2^15 draws are too few, and say so"
    effort("ci", block_draws=draws)
    (check,) = judged(sampler, name)
    assert not check.passed, check


@pytest.mark.parametrize("name", ["full call", full("launch"), full("filters")])
def test_the_same_sampler_without_a_bug_passes(name):
    sampler = HONEST[name]
    only = OF_FILTERS if name == "filters" else ("filters", "call", "invariance", "samples")
    checks = judged(sampler, *(only if name != "launch" else ()))
    assert len(checks) >= 2
    assert all(check.verdict == "ok" for check in checks), checks


# How much any two streams agree


def flat(m: int, n: int, V: int, seed: int) -> torch.Tensor:
    return torch.randint(V, (m, n), generator=torch.Generator().manual_seed(seed))


def alike(tokens, V, shifted):
    draws = Draws(bugs.planted(), SETTING.problem(1, V), {"flat": torch.zeros(V)})
    law = None if shifted else draws.probabilities("flat")
    return joint.alike("streams", draws, "flat", tokens, range(len(tokens)), law)


@pytest.mark.parametrize("shifted", [False, True])
def test_streams_that_share_nothing_have_honest_p_values(shifted):
    p_values = np.array([alike(flat(20, 60, 50, seed), 50, shifted)[1] for seed in range(300)])
    for level in (0.5, 0.1, 0.01):
        assert np.mean(p_values <= level) <= level + 3 * np.sqrt(level / len(p_values))


@pytest.mark.parametrize("shift", [0, 9])
def test_two_streams_of_many_that_share_a_quarter_are_found(shift):
    tokens = flat(60, 200, 500, 0)
    tokens[41, ::4] = (tokens[7, ::4] + shift) % 500
    told, p_value = alike(tokens, 500, shifted=True)
    assert p_value < ALPHA and told.startswith("streams 7 and 41: 5"), told
    assert (alike(tokens, 500, shifted=False)[1] < ALPHA) == (shift == 0)


# What is said at the end


def test_few_different_tokens_are_said():
    p = np.full(9001, 1 / 9001)
    counts = np.zeros(9001)
    counts[:64] = 200
    assert coverage(counts, p) == "draws 64 of 9001 tokens: "
    assert coverage(np.ones(9001), p) == ""
    assert coverage(np.array([5, 0]), np.array([1.0, 0.0])) == ""


@pytest.mark.parametrize(
    ("checks", "sentence"),
    [
        ([Check("edges", True, "")], "passed: 1 check of 0 draws found nothing wrong"),
        (
            [Check("fit", True, "", 1000), Check("tail 10", True, "", 500, deviates=True)],
            "passed: 2 checks of 1.5e+03 draws found nothing wrong, but for what it declares "
            "(tail 10)",
        ),
        (
            [Check("tail 10", False, "3 draws"), Check("fit", True, "")],
            "rejected: unlikely tokens are drawn too often or too rarely (tail 10: 3 draws)",
        ),
        (
            [Check("fit", False, "G = 9"), Check("tiles", False, "draws 64 of 9001 tokens: G")],
            "rejected: draws 64 of 9001 tokens; also fails fit",
        ),
    ],
)
def test_a_sampler_has_one_plain_sentence(checks, sentence):
    assert conclusion(checks) == sentence


def test_every_check_can_be_said():
    for name in battery.CHECKS:
        assert "rejected: " in conclusion([Check(name, False, "x")])
