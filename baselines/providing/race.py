"""The exponential race over stored probabilities, compiled: of the two samplers that draw so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.compiled import compile_step
from fsbench.baselines.providing.logits import scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Launch, padded

if TYPE_CHECKING:
    from torch import Tensor


def build_race(problem: Problem, weight: Tensor, mode: str | None = None) -> Launch:
    """argmax_v p_v / E_v in one compiled graph, matmul included. mode: of torch.compile."""
    import torch

    V, temperature, weight = problem.V, problem.temperature, padded(weight)

    def step(hidden: Tensor, weight: Tensor) -> Tensor:
        probs = scaled_logits(hidden, weight, V, temperature).softmax(dim=-1)
        noise = torch.empty_like(probs).exponential_()
        return probs.div_(noise).argmax(dim=-1)

    compiled = compile_step(step, weight.new_zeros(problem.B, problem.D), weight, mode=mode)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return compiled(hidden, weight)

    return launch
