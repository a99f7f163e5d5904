"""Top-k and top-p by sorting, in eager PyTorch (`providing.sorted`). Every operation is a pass."""

from __future__ import annotations

from dataclasses import replace

from fsbench.baselines.providing.logits import penalizer
from fsbench.baselines.providing.sorted import SORTED, limits, make_step
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    step = make_step(problem, penalizer(problem, weight.device))
    weight = padded(weight)
    k, p = limits(problem, weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return step(hidden, weight, k, p)

    return launch


PROVIDER = Provider(
    name="sort_top_k_top_p",
    label="Sort, top-k/top-p (eager)",
    kind=Kind.TRUNCATED,
    build=build,
    capabilities=replace(SORTED, penalties=True),
    presets=("truncated",),
)
