"""The check `speculation`: honest samplers pass, and each of its two parts finds what it should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_calls import contract

from fsbench.provider import Provider
from fsbench.verify import verify
from fsbench.verify.check import Setting

pytestmark = pytest.mark.usefixtures("one_thread")


def judged(sampler: Provider, temperature: float = 1.0):
    (check,) = verify(sampler, Setting("cpu", "fp32", temperature), "ci", ["speculation"])
    return check


@pytest.mark.parametrize("noise", ["token", "group"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_an_honest_sampler_passes(noise, temperature):
    check = judged(contract(noise), temperature)
    assert check.verdict == "ok" and check.p_value is not None, check
    assert "tokens unchanged by drafts" in check.detail


def changed(change):
    """The reference as a sampler, with `change` of (arguments) before each call."""
    honest = contract("token")

    def sample(hidden, weight, **options):
        return honest.sample(hidden, weight, **change(hidden, dict(options)))

    return replace(honest, sample=sample)


def salted_by_logits(hidden, options):
    """Each sequence is its own, with or without drafts; but a drafter meets other noise."""
    return options | {
        "seed": options["seed"] + (hidden * torch.arange(hidden.shape[1])).sum(1).long()
    }


def position_of_the_step(hidden, options):
    """The position of a row is counted from its place in the step."""
    offset = options["offset"]
    return options | {"offset": offset + (torch.arange(len(hidden)) % 4 if len(hidden) > 6 else 0)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (salted_by_logits, "drafts accepted"),
        (position_of_the_step, "token 1 of request 0 is"),
    ],
)
def test_what_it_finds(change, said):
    check = judged(changed(change))
    assert not check.passed and said in check.detail, check


def test_a_sampler_of_another_noise_is_found_by_its_acceptance():
    check = judged(replace(contract("group"), capabilities=contract("token").capabilities))
    assert not check.passed and "drafts accepted" in check.detail, check


def test_right_drafts_must_all_be_accepted():
    # The target draws otherwise where drafts are behind it, for one position in five.
    def other_at_some(hidden, options):
        return options | {"offset": options["offset"] + (options["offset"] % 5 == 4) * len(hidden)}

    check = judged(changed(other_at_some))
    assert not check.passed, check
