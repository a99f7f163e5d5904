"""Public calls from several threads at once return what they return alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from fsbench.kernels import (
    flash_sample,
    prepare_head,
    score,
    screened_sample,
    truncated_sample,
    verify_drafts,
)

MODES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


def calls(device: str) -> list[Callable[[int], list[object]]]:
    """Return functions of a step that make a public call and return its results as lists."""
    B, V, D = (16, 30_000, 512) if device == "cuda" else (2, 140, 32)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, D, generator=generator).half().to(device)
    weight = (torch.randn(V, D, generator=generator) * 2 / D**0.5).half().to(device)
    head = prepare_head(weight)
    drafts = torch.arange(2 * B, device=device).view(B, 2)

    def noise(step: int) -> dict[str, torch.Tensor]:
        return {
            name: torch.full((1,), number, dtype=torch.int64, device=device)
            for name, number in (("seed", 3), ("offset", step))
        }

    def lists(*fields: torch.Tensor | None) -> list[object]:
        return [field.tolist() for field in fields if field is not None]

    return [
        lambda step: lists(*flash_sample(hidden, weight, **noise(step), return_logprob=True)),
        lambda step: lists(*flash_sample(hidden, weight, **noise(step))[:2]),
        lambda step: lists(*screened_sample(hidden, head, **noise(step))[:2]),
        lambda step: lists(*truncated_sample(hidden, weight, top_k=5, **noise(step))[:2]),
        lambda step: lists(*truncated_sample(hidden, weight, top_p=0.9, **noise(step))[:2]),
        lambda step: lists(score(hidden, weight, torch.full((B,), step, device=device)).logprob),
        lambda step: lists(*verify_drafts(drafts.repeat(1, 2)[:, :3].contiguous(), drafts)),
    ]


@pytest.mark.parametrize("device", MODES)
def test_threads_draw_what_one_thread_draws(device):
    threads = 8 if device == "cuda" else 3
    public, steps = calls(device), range(40 if device == "cuda" else 1)
    expected = [[call(step) for call in public] for step in steps]
    begin = Barrier(threads)

    def drawn(number: int) -> list[list[object]]:
        """Make all calls at all steps; each thread begins with another call."""
        begin.wait()
        order = [(number + i) % len(public) for i in range(len(public))]
        results = []
        for step in steps:
            by_call = {index: public[index](step) for index in order}
            results.append([by_call[index] for index in range(len(public))])
        return results

    with ThreadPoolExecutor(threads) as pool:
        for results in pool.map(drawn, range(threads)):
            assert results == expected
