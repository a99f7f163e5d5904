"""The battery rejects every planted bug, by its public entry, and accepts the honest twins."""

from __future__ import annotations

import mutant_samplers as samplers
import numpy as np
import pytest
import torch
from mutant_samplers import contract, planted
from planted_bugs import FIELD, RARE, SURVIVORS, race_in_fp32
from tiers import first_quick, full

from fsbench.verify import battery, subject, verify
from fsbench.verify.check import FAMILY, MOST_CHECKS, Setting
from fsbench.verify.effort import EFFORTS

pytestmark = pytest.mark.usefixtures("one_thread")

SETTING = Setting("cpu", "fp32", 0.7)  # a temperature whose neglect shows

HONEST = {
    "Gumbel argmax": planted(greedy=True, batch_invariant=False),
    "noise by tile": planted(samplers.by_tile),
    "inverse CDF": planted(draw=samplers.inverse_cdf),
}

MUTANTS = {  # bug -> (sampler, the check that must see it)
    "noise sign flipped": (planted(draw=samplers.sign_flipped), "fit"),
    "temperature ignored": (planted(draw=samplers.temperature_ignored), "fit"),
    "fp16 scores": (planted(draw=samplers.fp16_scores), "fit"),
    "CDF draw falls on the last token": (planted(draw=samplers.cdf_falls_on_the_last), "fit"),
    "CDF summed in bf16": (planted(draw=samplers.cdf_in_bf16), "variation"),
    "top-p where none was asked for": (planted(draw=samplers.crossing_token_dropped), "fit"),
    "ties to the last": (planted(draw=samplers.ties_to_the_last), "tiles"),
    "same noise for all rows": (planted(samplers.shared_by_rows), "rows"),
    "same noise at every step": (planted(samplers.step_ignored), "steps"),
    "same noise in every tile": (planted(samplers.every_tile_alike), "tiles"),
    "rank term missing": (planted(samplers.rank_missing), "tiles"),
    "key + 100 x tile": (planted(samplers.tile_times_100_added_to_seed), "seeds"),
    "key = seed + step": (planted(samplers.step_added_to_seed), "seeds"),
    "seed ignored": (planted(samplers.seed_ignored), "seeds"),
    "seed cut to 32 bits": (planted(samplers.seed_cut_to_32_bits), "seeds"),
    "few different rows of noise": (planted(samplers.few_keys), "collisions"),
    "one seed of many is bad": (planted(samplers.bad_seed), "fit of seeds"),
    "tile number keys the noise, B sets the tile": (
        planted(samplers.tile_of_the_batch_size, batch_invariant=True),
        "invariance",
    ),
    "padding with 0 for -inf": (planted(draw=samplers.padded_with_zero), "edges"),
    "padding returned": (planted(draw=samplers.padding_returned), "edges"),
    "T = 0 sampled": (planted(draw=samplers.warm_argmax, greedy=True), "greedy"),
    "greedy rows sampled": (contract(temperature=samplers.never_quite_greedy), "filters"),
    "mask ignored": (contract(mask=lambda allowed, *_: allowed | True), "filters"),
    "mask of the neighbour": (contract(mask=samplers.neighbours_mask), "invariance"),
    "request keyed by its row": (
        contract(seed=lambda seed: seed + torch.arange(len(seed))),
        "invariance",
    ),
    "sample added to the seed": (contract(sample=lambda of: (sum(of), 0)), "samples"),
    "offset one ahead": (contract(step=lambda offset: offset + 1), "oracle"),
    "offset cut to 31 bits": (contract(step=lambda offset: offset & 0x7FFFFFFF), "oracle"),
    "NaN rows drawn": (contract(tokens=lambda tokens: tokens.clamp_min(0)), "undefined rows"),
    "noise map not monotone": (contract(noise_map=samplers.rounded_map), "noise map"),
    "noise map not finite": (contract(noise_map=samplers.closed_map), "noise map"),
}
IN_THE_FAR_TAIL = {
    "a race in fp32 (vLLM 43150)": (planted(draw=race_in_fp32), "tail 18", 2**31),
    "24-bit u (vLLM 51367)": (planted(uniform=samplers.coarse_exponential), "tail 18", 3 * 2**29),
    "u = 1 gives +inf": (planted(uniform=samplers.closed_exponential), "tail 20", 2**29),
}
"""The full tier's 2^31 random numbers, or as many of them as these need."""


@pytest.fixture(autouse=True)
def fewer_tokens(effort):
    """The ci tier with a smaller vocabulary: noise is what takes time here.

    And with twice the draws of `fit`: half of them miss one lost thousandth of the mass at times.
    """
    effort("ci", vocabulary=2051, fit_draws=2**17)


def judged(sampler, only=(), tier="ci"):
    return list(verify(sampler, SETTING, tier, only))


SLOW = ("sample added to the seed", "top-p where none was asked for")


@pytest.mark.parametrize("bug", [full(bug) if bug in SLOW else bug for bug in MUTANTS])
def test_a_planted_bug_is_found(bug):
    sampler, name = MUTANTS[bug]
    (check,) = judged(sampler, [name])
    assert not check.passed, check
    assert check.detail


@pytest.mark.full
@pytest.mark.parametrize("bug", IN_THE_FAR_TAIL)
def test_a_bug_of_the_far_tail_is_found(bug, effort):
    sampler, name, tokens = IN_THE_FAR_TAIL[bug]
    # Of a vocabulary that stays in the cache: what is seen follows from tail_tokens alone.
    effort("full", vocabulary=2051, tail_tokens=tokens)
    (check,) = judged(sampler, [name], "full")
    assert not check.passed, check


@pytest.mark.parametrize("name", first_quick(HONEST))
def test_an_honest_sampler_passes_everything(name):
    checks = judged(HONEST[name])
    assert len(checks) >= 11
    assert all(check.verdict == "ok" for check in checks), checks


OF_FILTERS = {"truncated oracle", "truncation", "truncated draws"}
"""test_truncation.py has honest samplers and planted bugs for these."""


@pytest.mark.full
def test_an_honest_sampler_under_the_contract_passes_everything():
    other = {"variation", "tail", "fit of seeds", *OF_FILTERS}
    sharp = [name for name in battery.CHECKS if name not in other]
    checks = judged(contract(noise_map=samplers.honest_map), sharp)
    assert [check.name for check in checks] == sharp
    assert all(check.verdict == "ok" for check in checks), checks


def test_every_check_finds_a_planted_bug():
    tables = (MUTANTS, IN_THE_FAR_TAIL, SURVIVORS, RARE, FIELD)
    found = {name for table in tables for _, name, *_ in table.values()}
    of_the_reference = {"philox", "maximum"}  # test_checks.py plants those
    assert {name.split()[0] if "tail" in name else name for name in found} == (
        set(battery.CHECKS) - of_the_reference - {"truncated oracle"}
    )


@pytest.fixture
def tiny(monkeypatch, effort):
    """A battery of a few thousand draws, so that a thousand of them can be run."""
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
def test_honest_samplers_are_accepted_1000_seeds_in_a_row(tiny):
    """In theory one of 1,000 batteries fails with probability at most 1,000 FAMILY = 0.001.

    And p-values are such as they should be: not smaller than uniform ones.
    """
    statistical = [name for name in battery.CHECKS if name not in ("edges", "greedy", "invariance")]
    p_values = []
    for salt in range(1000):
        checks = judged(planted(samplers.salted(salt)), statistical)
        assert all(check.passed for check in checks), (salt, checks)
        p_values += [check.p_value for check in checks]
    assert len(p_values) == 10 * 1000
    for level in (0.1, 0.01, 0.001):
        share = np.mean(np.array(p_values) <= level)
        assert share <= level + 4 * np.sqrt(level / len(p_values)), (level, share)


def test_no_battery_has_more_statistical_checks_than_the_level_allows():
    """The p-values of one sampler that has every capability."""
    statistical = {"maximum", "filters", "fit", "fit of seeds", "tiles", "collisions"}
    statistical |= {"rows", "steps", "seeds", "samples", "variation", "truncation", "call"}
    statistical |= {"blocks", "truncated draws"}
    assert statistical <= set(battery.CHECKS)
    assert len(statistical) + len(EFFORTS["full", "cuda"].gaps) <= MOST_CHECKS
    assert FAMILY == 1e-6
