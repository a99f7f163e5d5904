"""Penalties of truncated_sample, and the TokenHistory that they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flash_sample_cases import (
    SEED,
    counter,
    normal_logits,
    problem,
    stored,
)
from truncated_cases import check, history

from fsbench import reference
from fsbench.kernels import Penalties, TokenHistory, truncated_sample
from fsbench.kernels.flash_sampling_topk_topp import PROVIDER
from fsbench.verify.check import Setting
from fsbench.verify.drawing import exact_head, random_logits
from fsbench.verify.pathwise import penalized, truncation
from fsbench.verify.truncation import PENALIZED

pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize(
    "amounts",
    [
        (1.3, 0.0, 0.0),
        (1.0, 0.7, 0.2),
        (0.8, -0.5, -0.4),  # seen tokens are preferred: the largest of a run grows
        (torch.linspace(0.5, 2, 5), torch.linspace(-1, 1, 5), torch.linspace(1, 0, 5)),
    ],
    ids=["repetition", "presence and frequency", "rewards", "of every row"],
)
def test_penalties(amounts):
    V = 150
    penalties = Penalties(history(5, V), *amounts)
    for filters in ({"top_k": 6}, {"top_p": 0.7, "min_p": 0.05}):
        check(**stored(normal_logits(5, V)), penalties=penalties, **filters, temperature=0.7)


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


def test_the_sampler_has_the_penalties_of_its_problem():
    problem = replace(Setting("cpu", "fp16").problem(5, 300), top_k=20, top_p=0.9, **PENALIZED)
    hidden, weight, logits = exact_head(problem, random_logits(problem, 1))
    tokens = PROVIDER.build(problem, weight)(hidden, SEED, counter(3))
    logits, _ = penalized(problem, logits)
    kept = truncation(problem, PROVIDER.capabilities, logits, 1e-5)
    expected = reference.expect(logits, SEED, counter(3), truncation=kept, logits_error=1e-5)
    assert expected.accepts(tokens).all()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "reference"])
def test_a_row_with_an_invalid_penalty_has_no_draw(kernels, monkeypatch):
    """Other rows are not disturbed."""
    if not kernels:
        monkeypatch.setattr("fsbench.kernels.truncated.api.runs_kernels", lambda *_: False)
    wrong = {"repetition": [-0.5, 0.0, torch.inf, torch.nan]}
    wrong |= {name: [torch.inf, -torch.inf, torch.nan] for name in ("presence", "frequency")}
    B = 12
    good = {name: torch.full((B,), 0.7) for name in wrong}
    bad = {name: x.clone() for name, x in good.items()}
    row = 1
    for name, values in wrong.items():
        bad[name][row : row + len(values)] = torch.tensor(values)
        row += len(values)
    arguments = {**stored(normal_logits(B, 150)), "seed": torch.arange(B), "temperature": 0.7}
    fields = {"return_logprob": True, "return_rank": True, "return_kept": True}
    for filters in ({"top_k": 6}, {}):
        sample, same = (
            truncated_sample(
                **arguments, penalties=Penalties(history(B, 150), **amounts), **filters, **fields
            )
            for amounts in (bad, good)
        )
        assert sample.valid.tolist() == [True, *[False] * (B - 2), True]
        assert (sample.tokens[1:-1] == -1).all() and sample.logprob[1:-1].isnan().all()
        assert (sample.rank[1:-1] == -1).all() and (sample.kept[1:-1] == 0).all()
        for field, expected in zip(sample, same, strict=True):
            assert field is None or torch.equal(field[[0, -1]], expected[[0, -1]])
