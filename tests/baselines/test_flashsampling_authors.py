"""Calls of the authors' package follow its conventions."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from fsbench.baselines.flashsampling_authors import PROVIDER
from fsbench.problem import Problem


def test_each_launch_passes_another_seed_and_the_temperature_as_a_tensor(monkeypatch):
    calls = []

    def fused_mm_sample_triton(weights, hidden_states, num_samples, temperature, seed):
        calls.append((num_samples, temperature, seed))
        logits = hidden_states.float() @ weights.float().T / temperature
        return logits.argmax(1, keepdim=True).expand(-1, num_samples)

    core = ModuleType("fused_mm_sampling.core")
    core.fused_mm_sample_triton = fused_mm_sample_triton  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fused_mm_sampling", ModuleType("fused_mm_sampling"))
    monkeypatch.setitem(sys.modules, "fused_mm_sampling.core", core)
    hidden, weight = torch.randn(3, 8), torch.randn(20, 8)
    launch = PROVIDER.build(Problem(3, 8, 20, "bf16", 0.7), weight)
    zero = torch.zeros(1, dtype=torch.int64)
    tokens = [launch(hidden, zero, zero) for _ in range(4)]
    assert all(each.equal((hidden @ weight.T).argmax(1)) for each in tokens)
    samples, temperatures, seeds = zip(*calls, strict=True)
    assert set(samples) == {1} and len(set(seeds)) == 4
    assert all(T.ndim == 0 and T.item() == torch.tensor(0.7).item() for T in temperatures)


def test_rows_that_tma_cannot_load_are_refused():
    assert "16 bytes" in PROVIDER.supports(Problem(1, 100, 64, "bf16"))
    assert PROVIDER.supports(Problem(1, 104, 64, "bf16")) is None
