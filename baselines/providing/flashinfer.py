"""Code of the FlashInfer baselines: random numbers, and the steps before FlashInfer's samplers.

Random numbers (sampling.cuh of FlashInfer 0.6.9). Every kernel reads one `seed` and one `offset`,
64 bits each, and starts cuRAND's Philox 4x32-10 with key `seed` at word `offset` of a subsequence:

- sampling_from_logits: one subsequence per row and aligned group of gcd(4, V) tokens; it uses that
  many consecutive words, one per token.
- sampling_from_probs, min_p_sampling_from_probs: one subsequence per row, one word.
- top_p_sampling_from_probs: one subsequence per row, one word per round of rejection; with
  top_p = 1 the first round nearly always accepts.

So a caller must advance `offset` by at least 4 (FlashInfer reserves 32 per row where it rejects).
fsbench's step advances by 1. Passed as `offset`, three of four Gumbels of a step would be those of
the previous step, shifted by one token. Multiplying it on the device would add a kernel of about
2 us to every step, which an engine does not need: it advances by the right stride.

Instead the two are exchanged: the step is the key and the seed the position. Every step then has
another key, for any seed, and no kernel is added. But at one step, seeds less than 4 apart overlap
as described, so independent runs need seeds that are further apart, for example hashed ones. Any
int64 is a valid position: the subsequence is in other counter words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsbench.baselines.providing.compiled import compile_step
from fsbench.baselines.providing.logits import Gather, float_logits, matmul_logits, penalizer
from fsbench.problem import Problem
from fsbench.provider import ALIGNED, Launch, padded

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def philox(seed: Tensor, offset: Tensor) -> dict[str, Tensor]:
    """Return FlashInfer's `seed` and `offset`: fsbench's, exchanged (see above)."""
    return {"seed": offset, "offset": seed}


TOP_K_TOP_P: dict[str, Any] = {
    "filters": ("top_k", "top_p"),
    "mixed_filters": True,
    "ties": "kept",
}
"""Capabilities of FlashInfer's sampler with both filters: top-k first, then top-p of its tokens."""


def top_k_and_top_p(problem: Problem, device: torch.device) -> tuple[int | Tensor, float | Tensor]:
    """Return FlashInfer's top_k and top_p: numbers, or int32 and fp32 [B] if mixed.

    Without top-k, k is -1, as in the paper; in a mixed batch V, since a tensor has no -1.
    """
    import torch

    if not problem.mixed:
        return problem.top_k or -1, problem.top_p
    rows = problem.row_filters()
    return (
        torch.tensor([k or problem.V for k, _, _ in rows], dtype=torch.int32, device=device),
        torch.tensor([p for _, p, _ in rows], dtype=torch.float32, device=device),
    )


def build_as_in_paper(
    problem: Problem,
    weight: Tensor,
    sample: Callable[..., Tensor],
    gather: Gather | None = None,
) -> Launch:
    """Build the step of the paper: a compiled graph, then sample(logits, indices=, seed=, offset=).

    The graph makes logits [B, V] in the problem's dtype, divides them by the temperature (a 0-d
    device tensor, also at T = 1) and makes the indices of rows, int32 [B].

    Args:
        gather: Gathers the logits of a sharded weight (`logits.gathering`).
    """
    import torch

    temperature = torch.tensor(problem.temperature, dtype=torch.float32, device=weight.device)
    V, weight = len(weight), padded(weight)

    def front(hidden: Tensor, weight: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        logits = matmul_logits(hidden, weight, V)
        if gather is not None:
            logits = gather(logits)
        logits = (logits / temperature).contiguous()
        indices = torch.arange(hidden.shape[0], dtype=torch.int32, device=hidden.device)
        return logits, indices

    compiled = compile_step(front, weight.new_zeros(problem.B, problem.D), weight, temperature)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits, indices = compiled(hidden, weight, temperature)
        return sample(logits, indices=indices, **philox(seed, offset))

    return _loaded(launch, problem, weight)


def build_lean(problem: Problem, weight: Tensor, sample: Callable[..., Tensor]) -> Launch:
    """Build a step without avoidable passes: matmul, penalties, sample(logits, seed=, offset=).

    FlashInfer's samplers read fp32 and would cast, so the matmul writes fp32. They take contiguous
    rows, so the logits of a padded weight's padding are set to -inf.
    """
    weight = padded(weight)
    penalize = penalizer(problem, weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        logits = float_logits(hidden, weight)
        if logits.shape[1] > problem.V:
            logits[:, problem.V :] = -math.inf
        return sample(penalize(logits), **philox(seed, offset))

    return _loaded(launch, problem, weight)


def build_filtered(problem: Problem, weight: Tensor, order: str) -> Launch:
    """Build matmul with fp32 output, softmax at T, then FlashInfer's sampler with both filters.

    A filter that is off keeps all tokens.

    Args:
        order: Its `filter_apply_order`, "top_k_first" or "joint".
    """
    from flashinfer.sampling import softmax, top_k_top_p_sampling_from_probs

    temperature = problem.temperature
    top_k, top_p = top_k_and_top_p(problem, weight.device)
    if isinstance(top_k, int) and top_k < 0:
        top_k = problem.V + -problem.V % ALIGNED

    def sample(logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        probs = softmax(logits, temperature=temperature)
        return top_k_top_p_sampling_from_probs(
            probs, top_k, top_p, filter_apply_order=order, seed=seed, offset=offset
        )

    return build_lean(problem, weight, sample)


def _loaded(launch: Launch, problem: Problem, weight: Tensor) -> Launch:
    """Call `launch` once and return it: the first call loads FlashInfer's CUDA module."""
    import torch

    zero = torch.zeros(1, dtype=torch.int64, device=weight.device)
    launch(weight.new_zeros(problem.B, problem.D), zero, zero)
    return launch
