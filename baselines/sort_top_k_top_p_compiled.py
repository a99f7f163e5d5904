"""Top-k and top-p by sorting, under torch.compile (`providing.sorted`). The sort stays a call."""

from __future__ import annotations

from fsbench.baselines.providing.compiled import build_compiled
from fsbench.baselines.providing.sorted import SORTED, limits, make_step
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    return build_compiled(
        problem, padded(weight), make_step(problem), *limits(problem, weight.device)
    )


PROVIDER = Provider(
    name="sort_top_k_top_p_compiled",
    label="Sort, top-k/top-p",
    kind=Kind.TRUNCATED,
    build=build,
    capabilities=SORTED,
    presets=("truncated",),
)
