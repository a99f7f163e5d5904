"""Calls of truncated_sample like an earlier one: past the checks, with the same tokens."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
from flash_sample_cases import TILES, counter, problem
from repeating import Checked
from truncated_cases import history

from fsbench.errors import InvalidType
from fsbench.kernels import Penalties, truncated_sample
from fsbench.kernels.call import repeated

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread", "nothing_known")]
CHECKS = "fsbench.kernels.truncated.api.checked_request"
B, V, D = 3, 300, 32


def given(seed: int = 0, sigma: float = 2.0, **changes: object) -> dict:
    hidden, weight = problem(B, V, D, sigma=sigma)
    found = {"hidden": hidden, "weight": weight, "seed": counter(seed), "offset": counter(5)}
    return found | changes


PAIRS = [
    ({"top_k": 20, "top_p": 0.9}, {"top_k": 20, "top_p": 0.3}),
    ({"top_k": 1000, "top_p": 0.5, "min_p": 0.1}, {"top_k": 1000, "top_p": 0.9, "min_p": 0.01}),
    ({"top_p": 0.9}, {"top_p": 0.1}),
    ({"min_p": 0.05, "vocab_size": V - 7, "noise": "token"},) * 2,
    ({},) * 2,
    (
        {"top_k": torch.tensor([3, 0, 200]), "top_p": torch.ones(B), "min_p": 0.01},
        {"top_k": torch.tensor([0, 7, 9]), "top_p": torch.tensor([0.5, 0.1, 1.0]), "min_p": 0.01},
    ),
    (
        {"top_p": torch.ones(B), "temperature": torch.ones(B)},
        {"top_p": torch.tensor([0.1, 0.5, torch.nan]), "temperature": torch.tensor([1.0, 0.0, 2])},
    ),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_it_draws_what_a_checked_call_draws(pair, checks_raise, monkeypatch):
    first, second = pair
    truncated_sample(**given(**first))
    other = given(seed=7, sigma=1.0, **second)
    with monkeypatch.context() as unknown:
        unknown.setattr(repeated, "_launches", {})
        expected = truncated_sample(**other)
    checks_raise()
    drawn = truncated_sample(**other)
    assert drawn.tokens.tolist() == expected.tokens.tolist()
    assert drawn.valid.tolist() == expected.valid.tolist()
    assert drawn[2:] == (None,) * len(drawn[2:])


OPTIONS = {
    "top_k": (21, 20.0, True, torch.full((B,), 20)),
    "top_p": (1.0, 2.0, 0.0, 1, torch.nan, -0.9, torch.ones(B).double()),
    "min_p": (0.1, 0, torch.nan, -0.1, torch.zeros(B)),
    "temperature": (1, True, torch.ones(B)),
    "penalties": (Penalties(history(B, V)),),
    "bias": (torch.zeros(V),),
    "mask": (torch.ones(B, V, dtype=torch.bool),),
    "soft_cap": (30.0,),
    "vocab_size": (V, True, float(V)),
    **dict.fromkeys(
        ["return_kept", "return_logprob", "return_kept_logprob", "return_rank"], (True, 1, 0)
    ),
    "return_support": (1, False),
    "return_top": (1, False),
    "logprob_temperature": (1.0,),
    "noise": ("token", None),
    "config": (TILES,),
}
"""Every option, with values that the call below has not; some are equal to one that it has."""


def test_every_option_goes_by_the_checks(checks_raise):
    plain = {"top_k": 20, "top_p": 0.9}
    truncated_sample(**given(**plain))
    checks_raise()
    truncated_sample(**given(**plain))
    assert {*OPTIONS, *given()} == set(inspect.signature(truncated_sample).parameters)
    for name, values in OPTIONS.items():
        for value in values:
            with pytest.raises((Checked, InvalidType)):
                truncated_sample(**given(**plain | {name: value}))


def test_no_tensor_is_kept_alive():
    arguments = given(temperature=torch.ones(B), top_p=torch.full((B,), 0.9), top_k=torch.ones(B))
    arguments["top_k"] = arguments["top_k"].int()
    for _ in range(2):
        truncated_sample(**arguments)
    assert repeated._launches
    alive = [weakref.ref(x) for x in arguments.values()]
    arguments.clear()
    gc.collect()
    assert [each() for each in alive] == [None] * 7


def test_numbers_that_never_come_again_are_of_one_kind():
    for i in range(1, 5):
        truncated_sample(**given(top_p=0.9 / i, min_p=0.01 / i, temperature=1.0 / i))
    assert len(repeated._launches) == 1
