"""The path from a GPU, with CPU tensors in place of the GPU's."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fsbench.inputs import make_hidden, make_weight
from fsbench.problem import Problem
from fsbench.simple import native
from fsbench.verify.pathwise import check_on_problem

pytestmark = [
    pytest.mark.skipif(bool(native.missing()), reason=str(native.missing())),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture
def without_cuda(monkeypatch):
    """torch.cuda's stream and pinned memory, as nothing."""
    empty = torch.empty

    def made(*sizes, pin_memory=False, **options):
        return empty(*sizes, **options)

    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch, "empty", made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)


@pytest.mark.parametrize(
    ("dtype", "filters"),
    [("bf16", {}), ("fp16", {}), ("bf16", {"top_k": 20, "top_p": 0.9, "min_p": 0.01})],
)
@pytest.mark.parametrize("name", ["offload", "shvs"])
def test_tokens_are_those_of_the_path_on_a_cpu(name, dtype, filters, without_cuda):
    provider = importlib.import_module(f"fsbench.baselines.simple_{name}").PROVIDER
    on_cpu = Problem(48, 64, 3001, dtype, 0.9, "cpu", **filters)
    hidden, weight = make_hidden(on_cpu, 0), make_weight(on_cpu, 0)
    launch = provider.build(replace(on_cpu, device="cuda"), weight)
    check = check_on_problem(provider, on_cpu, launch, hidden, weight)
    assert check.passed, check
    counters = torch.tensor([3]), torch.tensor([4])
    expected = provider.build(on_cpu, weight)(hidden, *counters)
    assert torch.equal(launch(hidden, *counters), expected)
