"""Penalties of truncated_sample, and the TokenHistory that they read."""

from __future__ import annotations

import pytest
import torch
from flash_sample_cases import (
    normal_logits,
    problem,
    stored,
)
from truncated_cases import check, history

from fsbench.kernels import Penalties, TokenHistory, truncated_sample

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "amounts",
    [
        (1.3, 0.0, 0.0),
        (1.0, 0.7, 0.2),
        (0.8, -0.5, -0.4),  # seen tokens are preferred: the largest of a run grows
        (torch.linspace(0.5, 2, 9), torch.linspace(-1, 1, 9), torch.linspace(1, 0, 9)),
    ],
    ids=["repetition", "presence and frequency", "rewards", "of every row"],
)
def test_penalties(amounts):
    V = 150
    penalties = Penalties(history(9, V), *amounts)
    for filters in ({"top_k": 6}, {"top_p": 0.7, "min_p": 0.05}):
        check(**stored(normal_logits(9, V)), penalties=penalties, **filters, temperature=0.7)


def test_penalties_act_on_the_processed_logits_and_spare_forbidden_tokens():
    hidden, weight = problem(5, 100, 24)
    mask = normal_logits(5, 100) > 0
    penalties = Penalties(history(5, 100), 0.5, -3.0, 0.1)
    sample = check(
        hidden=hidden, weight=weight, mask=mask, soft_cap=4.0, penalties=penalties, top_k=9
    )
    assert mask.gather(1, sample.tokens[:, None]).all()


def test_a_long_history_takes_several_blocks():
    V = 400
    seen = torch.randperm(V, generator=torch.Generator().manual_seed(1))[:200].tolist()
    penalties = Penalties(
        TokenHistory.from_tokens([seen], [seen[:70] * 2], 256, "cpu"), 1.5, 0.5, 0.1
    )
    check(**stored(normal_logits(1, V)), penalties=penalties, top_k=5, top_p=0.9)


@pytest.mark.parametrize("name", ["repetition", "presence", "frequency"])
@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_a_row_with_an_invalid_penalty_has_no_draw(name, kernels, monkeypatch):
    """Other rows are not disturbed."""
    if not kernels:
        monkeypatch.setattr("fsbench.kernels.truncated.api.runs_kernels", lambda *_: False)
    wrong = [torch.inf, -torch.inf, torch.nan, *([-0.5, 0.0] if name == "repetition" else [])]
    amounts = torch.tensor([0.7, *wrong, 0.7])
    B = len(amounts)
    arguments = {**stored(normal_logits(B, 150)), "seed": torch.arange(B), "temperature": 0.7}
    fields = {"return_logprob": True, "return_rank": True, "return_kept": True}
    for filters in ({"top_k": 6}, {}):
        penalties = Penalties(history(B, 150), **{name: amounts})
        sample = truncated_sample(**arguments, penalties=penalties, **filters, **fields)
        good = Penalties(history(B, 150), **{name: torch.full((B,), 0.7)})
        same = truncated_sample(**arguments, penalties=good, **filters, **fields)
        assert sample.valid.tolist() == [True, *[False] * len(wrong), True]
        assert (sample.tokens[1:-1] == -1).all() and sample.logprob[1:-1].isnan().all()
        assert (sample.rank[1:-1] == -1).all() and (sample.kept[1:-1] == 0).all()
        for field, expected in zip(sample, same, strict=True):
            assert field is None or torch.equal(field[[0, -1]], expected[[0, -1]])
