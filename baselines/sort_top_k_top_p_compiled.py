"""Top-k and top-p by sorting, under torch.compile (`providing.sorted`). The sort stays a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.compiled import compile_step
from fsbench.baselines.providing.sorted import SORTED, limits, make_step
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, padded

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    weight = padded(weight)
    k, p = limits(problem, weight.device)
    step = compile_step(make_step(problem), weight.new_zeros(problem.B, problem.D), weight, k, p)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return step(hidden, weight, k, p)

    return launch


PROVIDER = Provider(
    name="sort_top_k_top_p_compiled",
    label="Sort, top-k/top-p",
    kind=Kind.TRUNCATED,
    build=build,
    capabilities=Capabilities(**SORTED),
    presets=("truncated",),
)
