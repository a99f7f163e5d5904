"""Calls of Liger-Kernel follow its conventions."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from tree import ROOT

from fsbench.baselines.score_liger import PROVIDER
from fsbench.discover import discover
from fsbench.errors import UnsupportedProblem
from fsbench.problem import Problem

MODULE = "liger_kernel.ops.fused_linear_scaled_cross_entropy"


class Loss(torch.nn.Module):
    """The negative log-probability [B], as Liger returns it."""

    @staticmethod
    def apply(hidden, weight, targets, temperature):
        assert type(temperature) is float and targets.dtype == torch.int64
        logits = hidden.float() @ weight.float().T / temperature
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")


@pytest.fixture
def capability(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.ops", MODULE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[MODULE].LigerFusedLinearScaledCrossEntropyFunction = Loss  # type: ignore[attr-defined]

    def imitate(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    return imitate


def test_the_loss_is_negated_at_the_temperature_of_the_problem(capability):
    capability(9, 0)
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)
    problem = Problem(3, 8, 20, "bf16", 0.7)
    zero = torch.zeros(1, dtype=torch.int64)
    logprob = PROVIDER.build(problem, weight)(hidden, zero, zero)
    expected = torch.log_softmax(hidden @ weight.T / 0.7, dim=1)
    targets = torch.tensor(problem.row_targets())[:, None]
    torch.testing.assert_close(logprob, expected.gather(1, targets)[:, 0])


def test_the_case_with_gradients_returns_the_same_log_probabilities(capability):
    capability(9, 0)
    case = discover([ROOT / "tools" / "cases" / "score.py"])["gradient_liger"].provider
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)
    problem = Problem(3, 8, 20, "bf16", 0.7)
    step = (hidden, *2 * [torch.zeros(1, dtype=torch.int64)])
    expected = PROVIDER.build(problem, weight)(*step)
    assert torch.equal(case.build(problem, weight)(*step), expected)


def test_gpus_on_which_liger_falls_back_to_products_are_refused(capability):
    capability(8, 0)
    with pytest.raises(UnsupportedProblem, match=r"compute capability 9\.0"):
        PROVIDER.build(Problem(3, 8, 20, "bf16"), torch.randn(20, 8))
