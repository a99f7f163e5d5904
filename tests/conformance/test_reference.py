"""The reference against a sampler that does not use it, so that its mistakes are not samplers'."""

from __future__ import annotations

import pytest
import torch

from fsbench import reference
from fsbench.baselines import sort_top_k_top_p
from fsbench.problem import Problem

pytestmark = pytest.mark.usefixtures("one_thread")

V, ROWS = 40, 8192
LOGITS = -0.06 * torch.arange(V, dtype=torch.float32)
LOGITS = LOGITS[torch.randperm(V, generator=torch.Generator().manual_seed(1))]
"""No two are equal, and 8192 rows draw each kept token (with probability 1 - e^-70)."""


def differing(truncate, **filters: float) -> list[int]:
    """Return the tokens that either `truncate` keeps or the sort baseline draws, but not both."""
    problem = Problem(ROWS, 64, V, "fp32", 0.7, "cpu", **filters)
    weight = torch.zeros(V, 64)
    weight[:, 0] = LOGITS
    hidden = torch.zeros(ROWS, 64)
    hidden[:, 0] = 1.0
    torch.manual_seed(0)
    launch = sort_top_k_top_p.PROVIDER.build(problem, weight)
    tokens = launch(hidden, torch.tensor([0]), torch.tensor([0]))
    drawn = torch.bincount(tokens, minlength=V) > 0
    kept = truncate(LOGITS[None], 0.7, **filters).kept[0]
    return (drawn != kept).nonzero()[:, 0].tolist()


FILTERS = [
    {"top_p": 0.3},
    {"top_p": 0.57},
    {"top_p": 0.9},
    {"top_k": 7},
    {"top_k": 9, "top_p": 0.8},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_reference_keeps_what_another_sampler_draws(filters):
    wrong = differing(reference.truncate, **filters)
    assert not wrong, (
        f"the reference and sort_top_k_top_p differ about the tokens {wrong}: before a sampler is "
        "blamed, fix fsbench.reference.truncate (or that baseline)"
    )


@pytest.mark.parametrize("change", [lambda p: p * 1.03, lambda p: p - 0.03, lambda p: 1 - p])
def test_a_wrong_top_p_of_the_reference_is_found(change):
    def wrong(logits, T, top_p=1.0, **filters):
        return reference.truncate(logits, T, top_p=change(top_p), **filters)

    assert any(differing(wrong, **filters) for filters in FILTERS[:3])
