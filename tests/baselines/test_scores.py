"""Scores of given tokens: chunks, Liger's call, and the kernel by its public call."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from fsbench import inputs
from fsbench.baselines import score_chunked, score_liger
from fsbench.kernels import flash_score
from fsbench.problem import Problem
from fsbench.verify.pathwise import check_on_problem

PROBLEM = Problem(7, 16, 50, "fp32", 1.0, "cpu")


def check(module, problem=PROBLEM):
    hidden, weight = inputs.make_hidden(problem, 0), inputs.make_weight(problem, 0)
    launch = module.PROVIDER.build(problem, weight)
    return check_on_problem(module.PROVIDER, problem, launch, hidden, weight)


@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_chunks_of_any_size_score_all_rows(rows, monkeypatch):
    monkeypatch.setattr(score_chunked, "ROWS", rows)
    assert check(score_chunked).passed


def test_liger_is_asked_for_the_loss_of_each_row(monkeypatch):
    def loss(hidden, weight, target, *, reduction):
        return torch.nn.functional.cross_entropy(hidden @ weight.T, target, reduction=reduction)

    names = ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional")
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].liger_fused_linear_cross_entropy = loss
    assert check(score_liger).passed


def test_liger_takes_no_temperature():
    cold = Problem(7, 16, 50, "bf16", 0.5)
    assert score_liger.PROVIDER.unsupported_reason(cold) == "has no temperature: T = 1 only"
    assert score_liger.PROVIDER.unsupported_reason(Problem(7, 16, 50, "bf16")) is None


@pytest.mark.interpreter
def test_the_kernels_score_names_its_tile_shapes():
    problem = Problem(7, 16, 50, "fp16", 0.5, "cpu")
    assert check(flash_score, problem).passed
    launch = flash_score.PROVIDER.build(problem, inputs.make_weight(problem, 0))
    assert launch.config
