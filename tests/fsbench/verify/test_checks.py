"""Declared deviations, checks of the reference's noise, draws, and the battery's list of checks.

Bugs of samplers are in test_planted.py.
"""

from __future__ import annotations

import pytest
import torch
from planted_samplers import mixed, own_exponential
from planted_samplers import stepped as provider

from fsbench import reference
from fsbench.errors import InvalidArgument, VerificationFailed
from fsbench.verify import battery, noise, verify
from fsbench.verify.call import request_counters
from fsbench.verify.check import Setting
from fsbench.verify.drawing import Draws, scalar, seed_hash
from fsbench.verify.effort import EFFORTS

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32")


@pytest.fixture(autouse=True)
def fewer_tokens(effort):
    """The ci tier with a smaller vocabulary and fewer draws of `tail`: 51 of a gap of 12 T."""
    effort("ci", vocabulary=1031, tail_tokens=2**23)


def race(logits, T, seed, offset):
    return (torch.softmax(logits / T, 1) / own_exponential(logits)).argmax(1)


# Samplers with a declared deviation


def deviating(logits, T, seed, offset):
    """2 % of draws fall on the last token."""
    tokens = race(logits, T, seed, offset)
    return torch.where(torch.rand(len(tokens)) < 0.02, logits.shape[1] - 1, tokens)


def cut(logits, T, seed, offset):
    """No Gumbel above 8."""
    noise = -own_exponential(logits).log_()
    return (logits + T * noise.clamp_max_(8.0)).argmax(1)


def run_checks(step, *names, **able):
    return list(verify(provider(step, **able), SETTING, "ci", names))


def verdicts(step, *names, **able):
    return [check.verdict for check in run_checks(step, *names, **able)]


@pytest.mark.full
def test_a_declared_deviation_is_held_to_its_size():
    names = ["fit", "fit of seeds", "tiles", "collisions", "variation"]
    assert set(verdicts(deviating, *names, known_deviation=0.03)) == {"not exact"}
    assert "FAILED" in verdicts(deviating, *names, known_deviation=0.002)
    assert set(verdicts(deviating, *names)) == {"FAILED"}


def test_a_declared_cut_of_the_tail_is_reported_and_does_not_fail():
    for check in run_checks(cut, "tail", exact_to_gap=5.0):
        assert check.verdict == "not exact" and "the tail is cut" in check.detail
    assert verdicts(cut, "tail") == ["FAILED", "FAILED"]
    assert verdicts(cut, "tail", exact_to_gap=11.0) == ["FAILED", "not exact"]


@pytest.mark.full
def test_a_declared_cut_shows_in_a_large_vocabulary(effort):
    effort("ci", variation_draws={"stored": 2**15})
    assert verdicts(cut, "variation") == ["FAILED"]
    assert verdicts(cut, "variation", exact_to_gap=9.0) == ["FAILED"]  # claims too much
    (check,) = run_checks(cut, "variation", exact_to_gap=5.0)
    assert check.verdict == "not exact" and "of exact" in check.detail


def test_a_declared_cut_does_not_allow_too_many_draws():
    (_, far) = run_checks(deviating, "tail", exact_to_gap=5.0)
    assert far.verdict == "FAILED" and "too many" in far.detail
    assert verdicts(deviating, "variation", exact_to_gap=5.0) == ["FAILED"]


@pytest.mark.full
def test_a_declared_excess_is_held_to_its_size(effort):
    """A coarse logarithm draws the tail 1.5 times as often as it should.

    If an excess of 0.05 is allowed, 412 expected draws detect this, 206 not always.
    """

    def coarse(logits, T, seed, offset):
        noise = own_exponential(logits)
        return (logits / T - torch.where(noise < 0.01, noise / 1.5, noise).log_()).argmax(1)

    for gap, excess, tokens, expected in (
        (5.0, 0.7, 2**25, ["not exact", "not exact"]),
        (11.0, 0.7, 2**25, ["FAILED", "not exact"]),
        (5.0, 0.05, 2**26, ["FAILED", "FAILED"]),
    ):
        effort("ci", tail_tokens=tokens)
        able = {"exact_to_gap": gap, "excess_beyond_gap": excess}
        assert verdicts(coarse, "tail", **able) == expected, able


def test_seeds_closer_than_the_declared_stride_are_not_compared():
    def neighbors_share(logits, T, seed, offset):
        torch.manual_seed(mixed((int(seed) + 1) // 4, int(offset)))
        return race(logits, T, seed, offset)

    (check,) = run_checks(neighbors_share, "seeds")
    assert not check.passed and "seed + 1: " in check.detail
    assert verdicts(neighbors_share, "seeds", seed_stride=4) == ["ok"]


# The reference with a bug


def test_philox_is_checked(monkeypatch):
    assert verdicts(race, "philox", noise="group") == ["ok"]
    monkeypatch.setattr(noise, "GROUP_STREAM", 1)
    (check,) = run_checks(race, "philox", noise="group")
    assert not check.passed and "distinct blocks of" in check.detail
    monkeypatch.setattr(reference, "philox4x32", lambda counter, key: counter)
    (check,) = run_checks(race, "philox", noise="group")
    assert not check.passed and "expected" in check.detail


def test_the_largest_score_is_gumbel_and_a_cap_of_the_noise_is_found(monkeypatch, effort):
    effort("ci", vocabulary=4001, maxima={"group": 2**13, "token": 2**10})
    for form, rows in (("group", 2**13), ("token", 2**10)):
        (check,) = run_checks(race, "maximum", noise=form)
        assert check.passed and check.draws == rows
    group_noise = reference.group_noise

    def capped(*arguments):
        g, u = group_noise(*arguments)
        return g.clamp_max(9.0 - 3.5), u  # a group of 32 adds log 32 to its Gumbel

    monkeypatch.setattr(reference, "group_noise", capped)
    assert verdicts(race, "maximum", noise="group") == ["FAILED"]


def test_sample_codes_are_both_ends_the_middle_and_every_octave():
    codes = noise._sample_codes(2**12)
    assert (codes[1:] > codes[:-1]).all()
    assert (codes[0], codes[-1]) == (0, 2**32 - 1)
    assert {0, 1, 2**31, 2**31 - 1, 2**32 - 2} <= set(codes.tolist())
    assert set(torch.log2(codes[1:].double()).floor().tolist()) == set(map(float, range(32)))


# Drawing


def test_draws_are_from_the_named_row_and_restart_at_a_seed():
    steps = []

    def step(logits, T, seed, offset):
        steps.append((int(seed), int(offset)))
        return logits.argmax(1)

    rows = {"third": torch.tensor([0.0, 1, 9, 3]), "first": torch.tensor([5.0, 1, 2, 3])}
    draws = Draws(provider(step), SETTING.problem(3, 4), rows)
    draws.seed(-5)
    assert draws.draw("third", 2).tolist() == [[2, 2, 2]] * 2
    assert draws.counts("first", 4).tolist() == [6, 0, 0, 0]
    draws.seed(2**64 + 7)
    draws.draw("third", 1)
    assert steps == [(-5, 0), (-5, 1), (-5, 2), (-5, 3), (7, 0)]
    assert draws.probabilities("first").tolist() == pytest.approx(
        torch.softmax(rows["first"].double(), 0).tolist()
    )


def test_tokens_out_of_range_are_named():
    draws = Draws(provider(lambda logits, *_: logits.argmax(1) + 4), SETTING.problem(3, 4), {
        "flat": torch.zeros(4)})  # fmt: skip
    with pytest.raises(VerificationFailed, match=r"drew token 4 outside \[0, 4\)"):
        draws.draw("flat", 1)


def test_seeds_wrap_around_and_have_different_hashes():
    assert int(scalar(2**64 - 1, "cpu")) == -1
    assert len({seed_hash(seed) for seed in (0, 1, 2**32, 2**40, -1)}) == 5


# The battery


def test_a_wrong_tier_or_check_is_named():
    for arguments in (("fast",), ("ci", ["tials"])):
        with pytest.raises(InvalidArgument, match="expected one of"):
            list(verify(provider(race), SETTING, *arguments))


def test_every_check_that_runs_is_named_in_the_list():
    sampler = provider(race, zero_temperature=True)
    names = {
        name for name, _ in battery.applicable_checks(battery.make_subject(sampler, SETTING, "ci"))
    }
    assert {name.split(" ")[0] if name.startswith("tail") else name for name in names} <= set(
        battery.CHECKS
    )


def test_no_two_requests_of_the_full_call_share_their_noise():
    """A request at a step has the noise of (seed, offset + step): equal pairs are no new draws."""
    steps = max(effort.call_steps for effort in EFFORTS.values())
    seed, offset, _ = request_counters(301)
    pairs = {
        (s, o + step)
        for s, o in zip(seed.tolist(), offset.tolist(), strict=True)
        for step in range(steps)
    }
    assert len(pairs) == 301 * steps
