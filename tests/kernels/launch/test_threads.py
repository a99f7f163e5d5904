"""The public calls from eight threads at once: each draws what it draws alone."""

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

THREADS = 8
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
    """Public calls that take the number of a step and return what they draw, as lists."""
    B, V, D = (16, 30_000, 512) if device == "cuda" else (3, 200, 32)
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

    def found(*fields: torch.Tensor | None) -> list[object]:
        return [field.tolist() for field in fields if field is not None]

    return [
        lambda step: found(*flash_sample(hidden, weight, **noise(step), return_logprob=True)),
        lambda step: found(*flash_sample(hidden, weight, **noise(step))[:2]),
        lambda step: found(*screened_sample(hidden, head, **noise(step))[:2]),
        lambda step: found(*truncated_sample(hidden, weight, top_k=5, **noise(step))[:2]),
        lambda step: found(*truncated_sample(hidden, weight, top_p=0.9, **noise(step))[:2]),
        lambda step: found(score(hidden, weight, torch.full((B,), step, device=device)).logprob),
        lambda step: found(*verify_drafts(drafts.repeat(1, 2)[:, :3].contiguous(), drafts)),
    ]


@pytest.mark.parametrize("device", MODES)
def test_eight_threads_draw_what_one_draws(device):
    public, steps = calls(device), range(40 if device == "cuda" else 1)
    expected = [[call(step) for call in public] for step in steps]
    begin = Barrier(THREADS)

    def drawn(number: int) -> list[list[object]]:
        """All calls at all steps; each thread begins with another call."""
        begin.wait()
        order = [(number + i) % len(public) for i in range(len(public))]
        found = []
        for step in steps:
            here = {at: public[at](step) for at in order}
            found.append([here[at] for at in range(len(public))])
        return found

    with ThreadPoolExecutor(THREADS) as pool:
        for found in pool.map(drawn, range(THREADS)):
            assert found == expected
