"""The streaming sampler: undefined rows, greedy, and chunks (its law is tested in conformance)."""

from __future__ import annotations

import torch

from fsbench.kernels import flash_sampling_online as module


def test_greedy_over_many_chunks_is_the_argmax(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 37)
    hidden, weight = torch.randn(5, 24), torch.randn(1000, 24)
    tokens = module.flash_sampling_online(hidden, weight, 0.0)
    assert tokens.tolist() == (hidden @ weight.T).argmax(1).tolist()


def test_rows_without_a_draw_are_minus_one(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 16)
    hidden, weight = torch.randn(4, 8), torch.ones(50, 8)
    hidden[0] = torch.nan
    hidden[1] = -torch.inf
    hidden[2] = torch.inf
    tokens = module.flash_sampling_online(hidden, weight, 1.0)
    assert tokens[:3].tolist() == [-1, -1, -1]
    assert 0 <= int(tokens[3]) < 50
