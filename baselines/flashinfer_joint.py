"""FlashInfer's dual-pivot rejection sampling with top-k and top-p at once ("joint").

    tokens = top_k_top_p_sample(softmax(logits / T), k, p)

One kernel proposes tokens and accepts the first that both filters keep, narrowing what it proposes
by two pivots after each rejection (the FlashInfer blog of March 2025); no pass cuts or normalizes
probabilities before. p is a part of the whole mass, not of the mass after top-k, so this keeps at
least as many tokens as top-k first. One matmul with fp32 output and FlashInfer's softmax come
before. Random numbers: see `providing.flashinfer`.

Undefined rows, by reading: as `flashinfer_top_k_top_p`, token 0.
"""

from __future__ import annotations

from fsbench.baselines.providing.flashinfer import TOP_K_TOP_P, build_filtered
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider, Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    return build_filtered(problem, weight, "joint")


PROVIDER = Provider(
    name="flashinfer_joint",
    label="FlashInfer, top-k and top-p joint",
    kind=Kind.TRUNCATED,
    build=build,
    requires=("flashinfer",),
    capabilities=Capabilities(
        host_sync_free=True,
        penalties=True,
        filter_order=("temperature", "top_p", "top_k", "min_p"),
        **TOP_K_TOP_P,
    ),
    presets=("truncated",),
)
