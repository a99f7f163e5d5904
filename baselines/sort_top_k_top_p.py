"""Top-k and top-p by sorting, in eager PyTorch (`providing.sorted`). Every operation is a pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.logits import penalizer
from fsbench.baselines.providing.sorted import SORTED, limits, make_step
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, padded

if TYPE_CHECKING:
    from torch import Tensor


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
    capabilities=Capabilities(penalties=True, **SORTED),
    presets=("truncated",),
)
