"""Top-k and top-p by sorting all logits, the earlier way in the FlashInfer blog.

    sort; cut what is below the kth largest; softmax and running sum from the smallest; cut what has
    a running sum of at most 1 - p; put everything back in its place

The draw is an exponential race, as in `exponential_race`, which is what vLLM does with the result.
All logits equal to the kth largest are kept; the sort decides which of equal ones top-p cuts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from fsbench.baselines.providing.logits import TORCH_NOISE, matmul_logits
from fsbench.problem import Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SORTED = replace(TORCH_NOISE, filters=("top_k", "top_p"), mixed_filters=True, ties="any")
"""Capabilities of the eager and the compiled sampler."""


def limits(problem: Problem, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the filters of the blog's function: k int64 [B] (off: V), p fp32 [B] (off: 1)."""
    import torch

    rows = problem.row_filters()
    return (
        torch.tensor([min(k or problem.V, problem.V) for k, _, _ in rows], device=device),
        torch.tensor([p for _, p, _ in rows], dtype=torch.float32, device=device),
    )


def make_step(
    problem: Problem, penalize: Callable[[Tensor], Tensor] = lambda logits: logits
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Return a step that maps hidden, weight (padded), k, p to tokens [B].

    Args:
        penalize: Result of `logits.penalizer`.
    """
    import torch

    V, temperature, filtered = problem.V, problem.temperature, bool(problem.filters)

    def step(hidden: Tensor, weight: Tensor, k: Tensor, p: Tensor) -> Tensor:
        logits = penalize(matmul_logits(hidden, weight, V).float()) / temperature
        if filtered:
            ranked, index = logits.sort(dim=-1)
            kth = ranked.gather(1, (ranked.shape[1] - k)[:, None])
            ranked = ranked.masked_fill(ranked < kth, -torch.inf)
            cut = ranked.softmax(dim=-1).cumsum(dim=-1) <= 1 - p[:, None]
            cut[:, -1] = False  # keep at least one token
            ranked = ranked.masked_fill(cut, -torch.inf)
            logits = torch.empty_like(ranked).scatter_(1, index, ranked)
        probs = logits.softmax(dim=-1)
        return probs.div_(torch.empty_like(probs).exponential_()).argmax(dim=-1)

    return step
