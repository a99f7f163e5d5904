"""Log-probabilities of given tokens by Liger's fused linear cross entropy, forward alone.

    -liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")

Liger bounds its logits by the size of hidden: chunks of about B D / V rows, each of which reads the
whole weight. The host waits once per call, for the count of targets. There is no temperature, so
it is timed at T = 1. Not run yet: written by reading Liger's source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.scores import row_targets
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    targets = row_targets(problem, weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        loss: Tensor = liger_fused_linear_cross_entropy(hidden, weight, targets, reduction="none")
        return -loss

    return launch


def supports(problem: Problem) -> str | None:
    return None if problem.temperature == 1 else "has no temperature: T = 1 only"


PROVIDER = Provider(
    name="score_liger",
    label="Liger, fused linear cross entropy",
    kind=Kind.SCORE,
    build=build,
    supports=supports,
    requires=("liger_kernel",),
    capabilities=Capabilities(dtypes=("bf16", "fp16", "fp32"), graph_safe=False),
    presets=("score",),
)
