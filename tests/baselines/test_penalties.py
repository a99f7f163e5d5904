"""Penalties of the baselines over stored logits, against the reference."""

from __future__ import annotations

import pytest
import torch

from fsbench.baselines.providing.logits import penalizer
from fsbench.problem import Problem
from fsbench.verify.pathwise import penalized


@pytest.mark.parametrize("history", [1, 2, 301])
def test_penalties_are_those_of_the_reference(history: int) -> None:
    problem = Problem(
        *(5, 8, 200, "fp32", 1.0, "cpu"),
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        history=history,
    )
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(history))
    wanted, _ = penalized(problem, logits)
    assert (wanted != logits).any(1).all()
    changed = penalizer(problem, torch.device("cpu"))(logits)
    assert changed is logits
    assert torch.allclose(changed, wanted, rtol=1e-6, atol=1e-6)


def test_without_penalties_nothing_is_done() -> None:
    logits = torch.randn(2, 9)
    before = logits.clone()
    assert penalizer(Problem(2, 8, 9, "fp32"), torch.device("cpu"))(logits) is logits
    assert torch.equal(logits, before)
