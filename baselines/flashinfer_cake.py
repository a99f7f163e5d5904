"""FlashInfer's cake_sampling: a radix top-k over thread block clusters, then top-p and the draw.

    tokens = cake_sampling.top_k_top_p_sampling_from_probs(softmax(logits / T), k, p)

New in FlashInfer 0.7; Hopper and newer, 1 <= k <= 1024 < V. One matmul with fp32 output and
FlashInfer's softmax come before. Equal logits go to the lower index. It has one Philox stream for a
batch, whose seed and offset the host hands over: here those of torch's generator, so a captured
graph would repeat its draws. Not run yet: held to the source of 0.7.2.post1 by
`make check-engines`.

Undefined rows, by reading: NaN probabilities leave an arbitrary token.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from fsbench.baselines.providing.flashinfer import build_lean, top_k_and_top_p
from fsbench.errors import UnsupportedProblem
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor

MOST = 1024
"""The largest k."""


def build(problem: Problem, weight: Tensor) -> Launch:
    from flashinfer import cake_sampling
    from flashinfer.sampling import softmax

    temperature = problem.temperature
    top_k, top_p = top_k_and_top_p(problem, weight.device)

    def sample(logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        probs = softmax(logits, temperature=temperature)
        route = cake_sampling.cake_sampling_route(probs, top_k, problem.top_k)
        if route != "pipeline":  # it would fall back to flashinfer.sampling without a word
            raise UnsupportedProblem(f"flashinfer_cake: takes not {problem}: {route}")
        tokens: Tensor = cake_sampling.top_k_top_p_sampling_from_probs(
            probs, top_k, top_p, top_k_max=problem.top_k
        )
        return tokens

    return build_lean(problem, weight, sample)


def supports(problem: Problem) -> str | None:
    if not 1 <= problem.top_k <= min(MOST, problem.V - 1):
        return f"takes 1 <= top_k <= {MOST}, below V"
    return "takes a top_k for every row" if problem.mixed else None


def not_built() -> str | None:
    if importlib.util.find_spec("flashinfer.cake_sampling") is None:
        return "flashinfer has no cake_sampling: it needs 0.7 or newer"
    return None


PROVIDER = Provider(
    name="flashinfer_cake",
    label="FlashInfer, cake_sampling",
    kind=Kind.TRUNCATED,
    build=build,
    supports=supports,
    not_built=not_built,
    requires=("flashinfer",),
    compute_capability=(9, 0),
    capabilities=Capabilities(graph_safe=False, penalties=True, filters=("top_k", "top_p")),
)
