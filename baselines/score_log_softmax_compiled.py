"""Log-probabilities of given tokens under torch.compile: `score_log_softmax` as one graph.

The matmul stays a library call. The compiler fuses cast, division, sums and the look-up, so the
logits exist once, in their dtype.
"""

from __future__ import annotations

from fsbench.baselines.providing.compiled import build_compiled
from fsbench.baselines.providing.logits import STORED, row_targets, target_logprob
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    V, temperature = problem.V, problem.temperature

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return target_logprob(hidden, weight, V, temperature, targets)

    targets = row_targets(problem, weight.device)
    return build_compiled(problem, padded(weight), step, targets)


PROVIDER = Provider(
    name="score_log_softmax_compiled",
    label="log_softmax and gather (compiled)",
    kind=Kind.SCORE,
    build=build,
    capabilities=STORED,
    presets=("score",),
)
