"""compile_step: one compilation per build, in build, for as many shapes as a sweep has."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fsbench.baselines import exponential_race, multinomial_compiled
from fsbench.problem import Problem

NOISE = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
SHAPES = [(B, V) for V in (60, 61) for B in (1, 2, 3, 4, 5, 6)]


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch):
    """torch.compile with a backend that counts graphs: the limit is Dynamo's, whatever follows."""
    from torch._dynamo.testing import CompileCounter  # takes seconds to load

    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    return counter


@pytest.mark.parametrize("module", [multinomial_compiled, exponential_race])
def test_a_sweep_of_twelve_shapes_compiles_each_once_and_never_at_launch(module, counter) -> None:
    assert len(SHAPES) > torch._dynamo.config.recompile_limit
    launches = []
    for B, V in SHAPES:
        weight = torch.randn(V, 16)
        launch = module.PROVIDER.build(Problem(B, 16, V, "fp32", 1.0, "cpu"), weight)
        launches.append((launch, torch.randn(B, 16), V))
    assert counter.frame_count == len(SHAPES)

    torch.compiler.set_stance("fail_on_recompile")
    try:
        for launch, hidden, V in launches:
            tokens = launch(hidden, *NOISE)
            assert tokens.shape == (len(hidden),)
            assert 0 <= tokens.min() <= tokens.max() < V
    finally:
        torch.compiler.set_stance("default")
    assert counter.frame_count == len(SHAPES)
