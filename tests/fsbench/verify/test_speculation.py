"""The check `speculation`: correct samplers pass, and both of its parts detect planted bugs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from planted_calls import contract

from fsbench.provider import Provider
from fsbench.verify import verify
from fsbench.verify.check import Setting

pytestmark = pytest.mark.usefixtures("one_thread")


def checked(sampler: Provider, temperature: float = 1.0):
    (check,) = verify(sampler, Setting("cpu", "fp32", temperature), "ci", ["speculation"])
    return check


@pytest.mark.parametrize("noise", ["token", "group"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_an_honest_sampler_passes(noise, temperature):
    check = checked(contract(noise), temperature)
    assert check.verdict == "ok" and check.p_value is not None, check
    assert "tokens unchanged by drafts" in check.detail


def changed(change):
    """Return the reference as a sampler whose options `change` changes before each call."""
    honest = contract("token")

    def sample(hidden, weight, **options):
        return honest.sample(hidden, weight, **change(hidden, dict(options)))

    return replace(honest, sample=sample)


def salted_by_logits(hidden, options):
    """Add a function of the logits to the seed: drafts change no token, but a drafter's noise."""
    return options | {
        "seed": options["seed"] + (hidden * torch.arange(hidden.shape[1])).sum(1).long()
    }


def position_of_the_step(hidden, options):
    """Add the row's index in the step to its position."""
    offset = options["offset"]
    return options | {"offset": offset + (torch.arange(len(hidden)) % 4 if len(hidden) > 6 else 0)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (salted_by_logits, "drafts accepted"),
        (position_of_the_step, "token 1 of request 0 is"),
    ],
)
def test_changed_tokens_and_other_noise_are_found(change, message):
    check = checked(changed(change))
    assert not check.passed and message in check.detail, check


def test_another_form_of_noise_is_found_by_the_acceptance_rate():
    check = checked(replace(contract("group"), capabilities=contract("token").capabilities))
    assert not check.passed and "drafts accepted" in check.detail, check


def test_right_drafts_must_all_be_accepted():
    # The target draws otherwise where drafts are behind it, for one position in five.
    def other_at_some(hidden, options):
        return options | {"offset": options["offset"] + (options["offset"] % 5 == 4) * len(hidden)}

    check = checked(changed(other_at_some))
    assert not check.passed, check
