"""Scores of given tokens: chunks, and the kernel by its public call."""

from __future__ import annotations

import pytest

from fsbench import inputs
from fsbench.baselines import score_chunked
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


@pytest.mark.interpreter
def test_the_kernels_score_names_its_tile_shapes():
    problem = Problem(7, 16, 50, "fp16", 0.5, "cpu")
    assert check(flash_score, problem).passed
    launch = flash_score.PROVIDER.build(problem, inputs.make_weight(problem, 0))
    assert launch.config
