"""FlashInfer's cake_sampling: a radix top-k over thread block clusters, then top-p and the draw.

    tokens = cake_sampling.top_k_top_p_sampling_from_probs(softmax(logits / T), k, p)

New in FlashInfer 0.7, for Hopper and newer. One matmul with fp32 output and FlashInfer's softmax
come before. It serves batches whose largest k is from 1 to 1024 and below V; of other batches, such
as one with a plain row, it passes all rows to `flashinfer.sampling` silently. The results have
the route as the config. Of equal logits this one keeps those of lower index, the other
all.

It has one Philox stream for a batch, whose seed and offset the host passes: here those of
torch's generator, so a captured graph would repeat its draws.

Undefined rows, by reading: NaN probabilities leave an arbitrary token.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from fsbench.baselines.providing.flashinfer import build_lean, top_k_and_top_p
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from flashinfer import cake_sampling
    from flashinfer.sampling import softmax

    temperature = problem.temperature
    top_k, top_p = top_k_and_top_p(problem, weight.device)
    if isinstance(top_k, int) and top_k < 0:
        top_k = problem.V
    most = max(k or problem.V for k, _, _ in problem.row_filters())
    route = ""

    def sample(logits: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        nonlocal route
        probs = softmax(logits, temperature=temperature)
        route = route or cake_sampling.cake_sampling_route(probs, top_k, most)
        tokens: Tensor = cake_sampling.top_k_top_p_sampling_from_probs(
            probs, top_k, top_p, top_k_max=most
        )
        return tokens

    launch: Any = build_lean(problem, weight, sample)
    launch.config = route
    return launch


def not_built() -> str | None:
    spec = importlib.util.find_spec("flashinfer")
    installed = spec and spec.origin and Path(spec.origin).with_name("cake_sampling.py").exists()
    return None if installed else "flashinfer has no cake_sampling: it needs 0.7 or newer"


PROVIDER = Provider(
    name="flashinfer_cake",
    label="FlashInfer, cake_sampling",
    kind=Kind.TRUNCATED,
    build=build,
    not_built=not_built,
    requires=("flashinfer",),
    capabilities=Capabilities(
        graph_safe=False,
        penalties=True,
        filters=("top_k", "top_p"),
        mixed_filters=True,
        ties="any",
    ),
)
