"""One-pass Gumbel argmax over stored logits, in the interpreter, against the oracle."""

from __future__ import annotations

import pytest
import torch

from fsbench import reference
from fsbench.kernels import gumbel_argmax as module

pytestmark = pytest.mark.interpreter


def draw(logits: torch.Tensor, step: int, temperature: float) -> torch.Tensor:
    seed, offset = torch.tensor([-7]), torch.tensor([step])
    return module.gumbel_argmax(logits, seed, offset, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("B", "V"), [(1, 1), (3, 129), (2, 1024), (4, 5003)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_tokens_are_the_oracles(B, V, dtype, temperature):
    logits = 2 * torch.randn(B, V, generator=torch.Generator().manual_seed(V))
    logits = logits.to(dtype)
    for step in range(3):
        expected = reference.expect(logits, torch.tensor([-7]), torch.tensor([step]), temperature)
        assert draw(logits, step, temperature).tolist() == expected.tokens.tolist()


def test_blocks_that_are_skipped_never_hold_the_winner(monkeypatch):
    """Many small blocks in one program: nearly all are screened out, and none by mistake."""
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "_PROGRAMS", 1)
    logits = torch.randn(3, 4000, generator=torch.Generator().manual_seed(1))
    for step in range(2):
        expected = reference.expect(logits, torch.tensor([-7]), torch.tensor([step]), 1.0)
        assert draw(logits, step, 1.0).tolist() == expected.tokens.tolist()


def test_rows_without_a_draw_are_minus_one():
    logits = torch.randn(5, 3000)
    clean = draw(logits, 0, 1.0)
    logits[1, 2999] = torch.nan
    logits[2] = -torch.inf
    logits[4, 0] = torch.inf
    assert draw(logits, 0, 1.0).tolist() == [int(clean[0]), -1, -1, int(clean[3]), -1]
