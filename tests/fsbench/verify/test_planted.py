"""`verify` rejects samplers with planted bugs and accepts correct samplers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import planted_samplers as samplers
import pytest
import torch
from planted_bugs import BUGS, IN_THE_FAR_TAIL, RARE
from planted_calls import complete, contract, of_row_xor
from planted_races import HONEST as HONEST_RACE
from planted_samplers import by_inverse_cdf, filtered, planted
from tiers import first_quick, full

from fsbench.provider import Capabilities
from fsbench.verify import battery, invariance, joint, subject, truncation, verify
from fsbench.verify.check import (
    ALPHA,
    FAMILY,
    MOST_CHECKS,
    TEMPERATURES,
    Check,
    Setting,
    conclusion,
)
from fsbench.verify.effort import EFFORTS
from fsbench.verify.statistics import coverage

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32", TEMPERATURES[0], second=TEMPERATURES[1])
FILTER_CHECKS = ("truncated oracle", "truncation", "truncated draws", "requests")
"""test_truncation.py has honest samplers and planted bugs for these."""

SHARP = [name for name in battery.CHECKS if name not in ("variation", "tail", "fit of seeds")]
HONEST = {
    "Gumbel argmax": (planted(greedy=True, batch_invariant=False), ()),
    "noise by tile": (planted(samplers.by_tile), ()),
    "inverse CDF": (planted(draw=by_inverse_cdf(samplers.exact_cdf)), ()),
    "contract": (
        contract(noise_map=samplers.honest_map),
        [name for name in SHARP if name not in (*FILTER_CHECKS, "quantized")],
    ),
    "filters": (filtered(), FILTER_CHECKS[1:]),
}


@pytest.fixture(autouse=True)
def fewer_tokens(effort, monkeypatch):
    """The ci tier with smaller vocabularies, and fewer steps of `masks` and `tail`."""
    effort("ci", vocabulary=2051, filter_steps=24, tail_tokens=2**23)
    monkeypatch.setattr(subject, "_SMALL", (300, 250))
    monkeypatch.setattr(truncation, "_SIZES", (64, 250))
    monkeypatch.setattr(invariance, "_VOCABULARY", 515)
    monkeypatch.setattr(invariance, "_SHARDS", (0, 128, 256, 384, 515))


def run_checks(sampler, *only, tier="ci"):
    return list(verify(sampler, SETTING, tier, only))


RARE_MASK = "masked tokens emitted rarely (SGLang 33423)"
NEEDS = {
    ("packed mask words wrong from token 8192 on", "top-k above 1024 counts as 1024"): {
        "vocabulary": 9001
    },
    (RARE_MASK,): {"filter_steps": EFFORTS["ci", "cpu"].filter_steps},
    # Half of them miss one lost thousandth of the mass at times.
    ("top-p where none was asked for",): {"fit_draws": 2**17},
}


def of_both_tiers() -> list:
    """Return all bugs; make test has the first two of each check."""
    checks = Counter[str]()
    bugs = []
    for bug, (_, check) in BUGS.items():
        checks[check] += 1
        bugs.append(full(bug) if checks[check] > 2 else bug)
    return bugs


@pytest.mark.parametrize("bug", of_both_tiers())
def test_a_planted_bug_is_found(bug, effort):
    sampler, name = BUGS[bug]
    for few, changes in NEEDS.items():
        if bug in few:
            effort("ci", **changes)
    (check,) = run_checks(sampler, name)
    assert not check.passed and check.detail and "Error" not in check.detail, check


def test_a_bug_that_only_requests_detects():
    bug = "another way for few rows keeps one token more"
    assert all(check.passed for check in run_checks(BUGS[bug][0], "truncation", "truncated draws"))


@pytest.mark.parametrize("bit", [1, *map(full, (2, 4, 16, 32, 64)), 128])
def test_no_exchange_of_rows_keeps_the_pattern_of_temperatures(bit):
    (check,) = run_checks(complete(temperature=of_row_xor(bit)), "call")
    assert not check.passed and "Error" not in check.detail, check


@pytest.mark.full
@pytest.mark.parametrize("bug", IN_THE_FAR_TAIL)
def test_a_bug_of_the_far_tail_is_found(bug, effort):
    sampler, name, tokens = IN_THE_FAR_TAIL[bug]
    # Of a vocabulary that stays in the cache: what is seen follows from tail_tokens alone.
    effort("full", vocabulary=2051, tail_tokens=tokens)
    (check,) = run_checks(sampler, name, tier="full")
    assert not check.passed, check
    assert run_checks(HONEST_RACE, name, tier="full")[0].passed


@pytest.mark.full
@pytest.mark.parametrize("bug", RARE)
def test_a_rare_one_is_found_with_the_draws_of_a_gpu(bug, effort):
    draws = EFFORTS["ci", "cuda"].block_draws
    assert draws == EFFORTS["full", "cpu"].block_draws
    sampler, name = RARE[bug]
    assert run_checks(sampler, name)[0].passed, "2^15 draws are too few, and say so"
    effort("ci", block_draws=draws)
    (check,) = run_checks(sampler, name)
    assert not check.passed, check


@pytest.mark.parametrize("name", first_quick(HONEST))
def test_an_honest_sampler_passes_everything(name):
    sampler, only = HONEST[name]
    checks = run_checks(sampler, *only)
    assert len(checks) >= (len(only) or 11)
    assert all(check.verdict == "ok" for check in checks), checks


def test_an_honest_full_call_passes():
    checks = run_checks(complete(), "masks", "call", "invariance", "samples")
    assert [check.verdict for check in checks] == ["ok"] * 4, checks


def test_every_check_finds_a_planted_bug():
    checks = {name for table in (BUGS, IN_THE_FAR_TAIL, RARE) for _, name, *_ in table.values()}
    other_tests = {"philox", "maximum", "quantized"}  # in test_checks.py, test_quantized.py
    assert {name.split()[0] if "tail" in name else name for name in checks} == (
        set(battery.CHECKS) - other_tests - {"truncated oracle"}
    )


@pytest.fixture
def tiny(monkeypatch, effort):
    """A battery of a few thousand draws, so that hundreds of them can be run."""
    effort(
        "ci",
        vocabulary=131,
        fit_draws=2**10,
        block_draws=2**10,
        seeds=4,
        seed_draws=2**9,
        variation_draws={"stored": 2**10},
        gaps=(4,),
        tail_tokens=2**17,
        joint_steps=8,
        other_steps=4,
    )
    monkeypatch.setattr(subject, "_SMALL", (256, 60))


@pytest.mark.full
def test_honest_samplers_are_accepted_with_40_seeds(tiny):
    """One of 40 batteries fails with probability at most 40 FAMILY = 0.00004.

    Small p-values are not more frequent than uniform ones.
    """
    statistical = [name for name in battery.CHECKS if name not in ("edges", "greedy", "invariance")]
    p_values = []
    for salt in range(40):
        checks = run_checks(planted(samplers.salted(salt)), *statistical)
        assert all(check.passed for check in checks), (salt, checks)
        p_values += [check.p_value for check in checks]
    assert len(p_values) == 11 * 40
    for level in (0.1, 0.01, 0.001):
        share = np.mean(np.array(p_values) <= level)
        assert share <= level + 4 * np.sqrt(level / len(p_values)), (level, share)


def test_no_battery_has_more_statistical_checks_than_the_level_allows():
    """The p-values of one sampler that has every capability."""
    statistical = {"maximum", "masks", "fit", "fit of seeds", "tiles", "collisions"}
    statistical |= {"rows", "steps", "seeds", "samples", "variation", "truncation", "call"}
    statistical |= {"blocks", "truncated draws", "requests", "speculation"}
    assert statistical <= set(battery.CHECKS)
    assert len(statistical) + len(EFFORTS["full", "cuda"].gaps) <= MOST_CHECKS
    assert FAMILY == 1e-6


# Agreement of two streams


def flat(m: int, n: int, V: int, seed: int) -> torch.Tensor:
    return torch.randint(V, (m, n), generator=torch.Generator().manual_seed(seed))


def closest(tokens, V, shifted):
    p = torch.full((V,), 1 / V)
    return joint.closest_streams("streams", p, Capabilities(), tokens, range(len(tokens)), shifted)


@pytest.mark.parametrize("shifted", [False, True])
def test_streams_that_share_nothing_have_honest_p_values(shifted):
    p_values = np.array([closest(flat(20, 60, 50, seed), 50, shifted)[1] for seed in range(150)])
    for level in (0.5, 0.1, 0.01):
        assert np.mean(p_values <= level) <= level + 3 * np.sqrt(level / len(p_values))


@pytest.mark.parametrize("shift", [0, 9])
def test_two_streams_of_many_that_share_a_quarter_are_found(shift):
    tokens = flat(60, 200, 500, 0)
    tokens[41, ::4] = (tokens[7, ::4] + shift) % 500
    detail, p_value = closest(tokens, 500, shifted=True)
    assert p_value < ALPHA and detail.startswith("streams 7 and 41: 5"), detail
    assert (closest(tokens, 500, shifted=False)[1] < ALPHA) == (shift == 0)


# Details and conclusions


def test_few_different_tokens_are_reported():
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
            "passed: 2 checks of 1.5e+03 draws found nothing wrong, except for declared deviations "
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


def test_every_check_has_a_fault_in_words():
    for name in battery.CHECKS:
        assert "rejected: " in conclusion([Check(name, False, "x")])
