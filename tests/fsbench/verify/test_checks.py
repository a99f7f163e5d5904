"""The checks' own arithmetic: statistics against simulation, and the reference with a bug planted.

Bugs of samplers are in test_mutants.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fsbench import reference
from fsbench.errors import InvalidArgument, VerificationFailed
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider
from fsbench.verify import battery, distribution, joint, noise, verify
from fsbench.verify.check import ALPHA, FAMILY, Check, Setting
from fsbench.verify.drawing import Draws, hash_of, scalar
from fsbench.verify.statistics import (
    binomial_p,
    detectable_factor,
    detectable_share,
    detectable_spike,
    fit_check,
    g_test,
    independence_p,
    largest_count_p,
    poisson_p,
    pooled,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32")


@pytest.fixture(autouse=True)
def fewer_tokens(monkeypatch):
    """The draws of the ci tier, from a smaller vocabulary: noise is what takes time here."""
    effort = replace(battery.EFFORTS["ci", "cpu"], vocabulary=2051)
    monkeypatch.setitem(battery.EFFORTS, ("ci", "cpu"), effort)


def made(step, **able) -> Provider:
    """A sampler of step(logits, T, seed, offset) -> tokens."""

    def build(problem: Problem, weight):
        def launch(hidden, seed, offset):
            return step(hidden @ weight.T, problem.temperature, int(seed), int(offset))

        return launch

    capabilities = Capabilities(("cpu",), ("fp32",), **able)
    return Provider("made_up", "Made up", Kind.EXACT, build, capabilities=capabilities)


def race(logits, T, seed, offset):
    return (torch.softmax(logits / T, 1) / torch.empty_like(logits).exponential_()).argmax(1)


# Statistics


def test_pooled_bins_hold_enough_and_leave_nothing_out():
    expected = np.array([100.0, 3, 3, 30, 24, 0.5, 0.5, 26, 10])
    edges = pooled(expected)
    assert edges.tolist() == [0, 1, 4, 7]
    sums = np.add.reduceat(expected, edges)
    assert sums.min() >= 25 and sums.sum() == expected.sum()


def test_what_is_impossible_refutes_and_is_no_bin():
    p = np.array([0.5, 0.5, 0.0, 0.0])
    assert g_test(np.array([500, 500, 0, 0]), p).bins == 2
    assert g_test(np.array([500, 499, 0, 1]), p).p_value == 0.0


def test_p_values_of_the_g_test_are_uniform():
    p = np.full(60, 1 / 60)
    rng = np.random.default_rng(0)
    p_values = np.array([g_test(rng.multinomial(2**13, p), p).p_value for _ in range(500)])
    assert distribution.uniform_p(p_values) > 1e-3


def test_the_variation_bound_holds_and_is_of_use():
    """The law is 0.002 off; the bound is above that, and not twice the statistic's noise above."""
    p = np.full(1000, 1e-3)
    q = p * (1 + 0.004 * np.where(np.arange(1000) % 2, 1, -1))  # total variation 0.002
    rng = np.random.default_rng(0)
    bounds = [g_test(rng.multinomial(10**7, q), p).bound for _ in range(50)]
    assert min(bounds) > 0.002 and max(bounds) < 0.004
    assert g_test(rng.multinomial(10**8, p), p).bound < 0.001


def test_the_bound_does_not_reward_luck_and_is_none_where_the_law_is_refuted():
    p = np.full(100, 0.01)
    even = g_test(np.full(100, 1000), p)
    assert even.p_value == 1.0 and 0 < even.bound < 0.02
    assert even.bound == g_test(np.array([1010, 990] * 50), p).bound
    assert g_test(np.array([1100, 900] * 50), p).bound is None


@pytest.mark.parametrize("bins", [2, 3, 10, 10_000])
def test_there_is_a_bound_for_any_number_of_bins(bins):
    p, rng = np.full(bins, 1 / bins), np.random.default_rng(0)
    for _ in range(20):
        assert 0 < g_test(rng.multinomial(100 * bins, p), p).bound < 1


@pytest.mark.parametrize(("hits", "low", "high"), [(70, 0.1, 0.1), (130, 0.1, 0.1)])
def test_binomial_p_values_are_two_sided(hits, low, high):
    exact = binomial_p(hits, 1000, low, high)
    assert 1e-4 < exact < 1e-2
    assert binomial_p(hits, 1000, 0.06, 0.14) > 0.1
    assert binomial_p(100, 1000, 0.1) == 1.0


def test_what_a_tail_test_finds_is_what_a_simulation_finds():
    draws, p = 10**5, 0.002
    loss = float(detectable_share(draws, p).split()[2])
    hits = np.random.default_rng(0).binomial(draws, p * (1 - loss), 4000)
    found = np.mean([binomial_p(int(h), draws, p) <= ALPHA for h in hits])
    assert found == pytest.approx(0.9, abs=0.05)
    assert detectable_share(100, 1e-3).endswith("times too many")


def test_what_a_count_of_pairs_finds_is_what_a_simulation_finds():
    mean = 30_000.0
    pairs = np.random.default_rng(0).poisson(mean * (1 + detectable_factor(mean)), 1000)
    found = np.mean([poisson_p(int(n), mean) <= ALPHA for n in pairs])
    assert found == pytest.approx(0.9, abs=0.05)


def test_what_a_spectrum_finds_is_what_a_simulation_finds():
    cells, draws = 1000, 10_000
    share = detectable_spike(cells, draws, 1)
    rng = np.random.default_rng(0)
    shared = rng.binomial(draws, share, 500)
    found = []
    for n in shared:
        counts = np.bincount(rng.integers(0, cells, draws - n), minlength=cells)
        counts[17] += n
        found.append(largest_count_p(int(counts.max()), cells, draws) <= ALPHA)
    assert np.mean(found) == pytest.approx(0.9, abs=0.06)


def test_overlapping_pairs_of_a_chain_have_honest_p_values():
    generator = torch.Generator().manual_seed(0)
    p_values = []
    for _ in range(300):
        x = torch.randint(4000, (3000,), generator=generator)
        p_values.append(joint.independence(x[:-1], x[1:], 4000))
    assert distribution.uniform_p(np.array(p_values)) > 1e-3


def test_dependent_places_are_found():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(4000, (2, 20_000), generator=generator)
    assert joint.independence(x, y, 4000) > 1e-3
    near = (x + torch.randint(200, (20_000,), generator=generator)) % 4000
    mixed = torch.where(torch.rand(20_000, generator=generator) < 0.1, near, y)
    assert joint.independence(x, mixed, 4000) < ALPHA
    assert independence_p(np.array([[50, 0], [50, 0]])) == 0.0


def test_bins_of_the_large_problem_are_about_a_thousand_and_leave_no_token_out():
    V = 151_936
    p = 1 / torch.arange(1, V + 1, dtype=torch.float64)
    p = (p / p.sum())[torch.randperm(V, generator=torch.Generator().manual_seed(0))]
    bins = distribution.position_bins(p)
    assert len(bins) == V and 900 < bins.max() + 1 < 1300
    head = p.argsort(descending=True)[:128]
    assert (torch.bincount(bins)[bins[head]] == 1).all()
    # At 10^8 draws hardly any bin is so rare that it is pooled.
    expected = np.bincount(bins.numpy(), weights=1e8 * p.numpy())
    assert (expected >= 25).mean() > 0.99


# A sampler that says how it deviates


def deviating(logits, T, seed, offset):
    """2 % of draws fall on the last token."""
    tokens = race(logits, T, seed, offset)
    return torch.where(torch.rand(len(tokens)) < 0.02, logits.shape[1] - 1, tokens)


def cut(logits, T, seed, offset):
    """No Gumbel above 8."""
    noise = -torch.empty_like(logits).exponential_().log_()
    return (logits + T * noise.clamp_max_(8.0)).argmax(1)


def test_a_declared_deviation_is_held_to_its_size():
    def verdicts(**able):
        names = ["fit", "fit of seeds", "tiles", "collisions", "variation"]
        return [check.verdict for check in verify(made(deviating, **able), SETTING, "ci", names)]

    assert set(verdicts(known_deviation=0.03)) == {"not exact"}
    assert "FAILED" in verdicts(known_deviation=0.002)
    assert set(verdicts()) == {"FAILED"}


def test_a_declared_cut_of_the_tail_is_no_failure_and_is_told():
    (near, far) = verify(made(cut, exact_to_gap=5.0), SETTING, "ci", ["tail"])
    for check in (near, far):
        assert check.verdict == "not exact" and "the tail is cut" in check.detail
    (near, far) = verify(made(cut), SETTING, "ci", ["tail"])
    assert (near.verdict, far.verdict) == ("FAILED", "FAILED")
    (near, far) = verify(made(cut, exact_to_gap=11.0), SETTING, "ci", ["tail"])
    assert (near.verdict, far.verdict) == ("FAILED", "not exact")


def test_a_declared_cut_shows_in_the_law_of_a_large_vocabulary(monkeypatch):
    effort = replace(battery.EFFORTS["ci", "cpu"], variation_draws={"stored": 2**15})
    monkeypatch.setitem(battery.EFFORTS, ("ci", "cpu"), effort)

    def variation(**able):
        (check,) = verify(made(cut, **able), SETTING, "ci", ["variation"])
        return check

    assert variation().verdict == "FAILED"
    assert variation(exact_to_gap=9.0).verdict == "FAILED"  # claims more than it can
    check = variation(exact_to_gap=5.0)
    assert check.verdict == "not exact" and "of exact" in check.detail


def test_a_declared_cut_does_not_allow_too_many_draws():
    (_, far) = verify(made(deviating, exact_to_gap=5.0), SETTING, "ci", ["tail"])
    assert far.verdict == "FAILED" and "too many" in far.detail
    (check,) = verify(made(deviating, exact_to_gap=5.0), SETTING, "ci", ["variation"])
    assert check.verdict == "FAILED"


def test_a_declared_excess_is_held_to_its_size():
    """A third more draws of the tail than it should have, as a coarse logarithm may give."""

    def coarse(logits, T, seed, offset):
        noise = torch.empty_like(logits).exponential_()
        return (logits / T - torch.where(noise < 0.01, noise / 1.5, noise).log_()).argmax(1)

    def verdicts(**able):
        return [c.verdict for c in verify(made(coarse, **able), SETTING, "ci", ["tail"])]

    assert verdicts(exact_to_gap=5.0, excess_beyond_gap=0.7) == ["not exact", "not exact"]
    assert verdicts(exact_to_gap=11.0, excess_beyond_gap=0.7) == ["FAILED", "not exact"]
    assert verdicts(exact_to_gap=5.0, excess_beyond_gap=0.05) == ["FAILED", "FAILED"]
    assert verdicts(exact_to_gap=5.0) == ["FAILED", "FAILED"]


def test_seeds_closer_than_the_declared_stride_are_not_compared():
    def neighbours_share(logits, T, seed, offset):
        torch.manual_seed(hash_of(1000 * ((seed + 1) // 4) + offset))
        return race(logits, T, seed, offset)

    (check,) = verify(made(neighbours_share), SETTING, "ci", ["seeds"])
    assert not check.passed and "seed + 1: " in check.detail
    (check,) = verify(made(neighbours_share, seed_stride=4), SETTING, "ci", ["seeds"])
    assert check.passed


# The reference with a bug


def test_philox_is_checked(monkeypatch):
    assert noise.check_philox("cpu").passed
    monkeypatch.setattr(noise, "GROUP_STREAM", 1)
    check = noise.check_philox("cpu")
    assert not check.passed and "counters have a block of their own" in check.detail
    monkeypatch.setattr(reference, "philox4x32", lambda counter, key: counter)
    check = noise.check_philox("cpu")
    assert not check.passed and "expected" in check.detail


@pytest.mark.parametrize(("form", "rows"), [("group", 2**13), ("token", 2**10)])
def test_the_largest_score_is_gumbel(form, rows):
    check = noise.check_maximum(SETTING, form, 4001, rows)
    assert check.passed and check.draws == rows


@pytest.mark.parametrize("cap", [8.0, 9.0])
def test_a_cap_of_the_noise_shows_in_its_largest(cap, monkeypatch):
    group_noise = reference.group_noise

    def capped(*arguments):
        g, u = group_noise(*arguments)
        return g.clamp_max(cap - 3.5), u  # a group of 32 adds log 32 to its Gumbel

    monkeypatch.setattr(reference, "group_noise", capped)
    assert not noise.check_maximum(SETTING, "group", 4001, 2**13).passed


def test_some_codes_are_both_ends_the_middle_and_every_octave():
    codes = noise._some_codes(2**12)
    assert (codes[1:] > codes[:-1]).all()
    assert (codes[0], codes[-1]) == (0, 2**32 - 1)
    assert {0, 1, 2**31, 2**31 - 1, 2**32 - 2} <= set(codes.tolist())
    assert set(torch.log2(codes[1:].double()).floor().tolist()) == set(map(float, range(32)))


# Drawing


def test_draws_are_those_of_the_row_asked_for_and_begin_anew_at_a_seed():
    steps = []

    def step(logits, T, seed, offset):
        steps.append((seed, offset))
        return logits.argmax(1)

    rows = {"third": torch.tensor([0.0, 1, 9, 3]), "first": torch.tensor([5.0, 1, 2, 3])}
    draws = Draws(made(step), SETTING.problem(3, 4), rows)
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
    draws = Draws(made(lambda logits, *_: logits.argmax(1) + 4), SETTING.problem(3, 4), {
        "flat": torch.zeros(4)})  # fmt: skip
    with pytest.raises(VerificationFailed, match=r"drew token 4 outside \[0, 4\)"):
        draws.draw("flat", 1)


def test_seeds_wrap_around():
    assert int(scalar(2**64 - 1, "cpu")) == -1
    assert len({hash_of(seed) for seed in (0, 1, 2**32, 2**40, -1)}) == 5


# The battery


def test_a_wrong_tier_or_check_is_named():
    for arguments in (("fast",), ("ci", ["tials"])):
        with pytest.raises(InvalidArgument, match="expected one of"):
            list(verify(made(race), SETTING, *arguments))


def test_every_check_that_runs_is_named_in_the_list():
    sampler = made(race, zero_temperature=True)
    names = {name for name, _ in battery._Battery(sampler, SETTING, "ci").todo()}
    assert {name.split(" ")[0] if name.startswith("tail") else name for name in names} <= set(
        battery.CHECKS
    )


def test_verdicts():
    assert Check("x", True, "").verdict == "ok"
    assert Check("x", True, "", deviates=True).verdict == "not exact"
    assert Check("x", False, "", deviates=True).verdict == "FAILED"
    assert fit_check("x", np.array([500, 500]), np.array([0.5, 0.5])).verdict == "ok"
    assert ALPHA < FAMILY
