"""Screened draws like an earlier one: past the checks, with the same tokens and refusals."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import counter, problem
from repeating import Checked

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import flash_sample, prepare_head, screened_sample

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread", "nothing_known")]
CHECKS = "fsbench.kernels.screened.api.checked_request"
B, V, D = 3, 300, 64


def given(seed: int = 0, sigma: float = 2.0, **changes: object) -> dict:
    hidden, weight = problem(B, V, D, sigma=sigma)
    found = {"hidden": hidden, "head": prepare_head(weight)}
    found |= {"seed": counter(seed), "offset": counter(5), "temperature": 1.0}
    return found | changes


@pytest.mark.parametrize(
    "pair",
    [(1.0, 0.3), (0.0, 0.0), (torch.ones(B), torch.tensor([0.0, 0.4, 2.0]))],
    ids=["float", "greedy", "of each row"],
)
def test_it_draws_the_tokens_of_flash_sample(pair, checks_raise):
    first, second = pair
    screened_sample(**given(temperature=first))
    checks_raise()
    for seed in range(5):
        other = given(seed=seed, sigma=1.0, temperature=second)
        drawn = screened_sample(**other)
        weight = other.pop("head").weight
        expected = flash_sample(weight=weight, noise="token", **other)
        assert drawn.tokens.tolist() == expected.tokens.tolist()
        assert drawn.valid.tolist() == expected.valid.tolist()
        assert drawn.found.min() > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"noise": "group8"},
        {"mask": torch.ones(B, V, dtype=torch.bool)},
        {"bias": torch.zeros(V)},
        {"soft_cap": 20.0},
        {"vocab_size": V - 1},
        {"return_logz": True},
        {"num_samples": 2},
        {"temperature": 0.0},
        {"offset": None},
        {"temperature": torch.ones(B)},
        {"hidden": torch.zeros(B + 1, D)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_other_calls_are_checked(changes, checks_raise):
    screened_sample(**given())
    checks_raise()
    if {"return_logz", "num_samples"} & set(changes):  # calls of flash_sample
        assert screened_sample(**given(**changes)).found is None
        return
    with pytest.raises(Checked):
        screened_sample(**given(**changes))


def test_a_head_whose_weight_has_changed_is_refused(checks_raise):
    arguments = given()
    screened_sample(**arguments)
    checks_raise()
    arguments["head"].weight[5] += 1
    with pytest.raises(InvalidArgument, match="has changed"):
        screened_sample(**arguments)


def test_parts_of_a_head_are_looked_at(monkeypatch):
    arguments = given()
    screened_sample(**arguments)
    head = arguments["head"]
    for name, other in {"codes": head.codes.int(), "scale": head.scale[:-1]}.items():
        with monkeypatch.context() as patched:
            patched.setattr(head, name, other)
            with pytest.raises((InvalidType, InvalidArgument), match=f"head.{name}"):
                screened_sample(**arguments)
    with pytest.raises(InvalidType, match="ScreenedHead"):
        screened_sample(**(arguments | {"head": head.weight}))
