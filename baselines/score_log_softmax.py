"""Log-probabilities of given tokens in eager PyTorch: the simplest code.

    log_softmax((hidden @ weight.T).float() / T).gather(targets)

The logits exist four times: in their dtype, in fp32, divided by T, and as log-probabilities.
"""

from __future__ import annotations

from fsbench.baselines.providing.logits import STORED, row_targets, target_logprob
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Tensor, padded


def build(problem: Problem, weight: Tensor) -> Launch:
    weight, targets = padded(weight), row_targets(problem, weight.device)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return target_logprob(hidden, weight, problem.V, problem.temperature, targets)

    return launch


PROVIDER = Provider(
    name="score_log_softmax",
    label="log_softmax and gather (eager)",
    kind=Kind.SCORE,
    build=build,
    capabilities=STORED,
    presets=("score",),
)
