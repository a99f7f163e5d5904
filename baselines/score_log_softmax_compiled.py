"""Log-probabilities of given tokens under torch.compile: `score_log_softmax` as one graph.

The matmul stays a library call. The compiler fuses cast, division, sums and the look-up, so the
logits exist once, in their dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.compiled import compile_step
from fsbench.baselines.providing.logits import STORED, row_targets, target_logprob
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, padded

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    V, temperature = problem.V, problem.temperature
    weight, targets = padded(weight), row_targets(problem, weight.device)

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return target_logprob(hidden, weight, V, temperature, targets)

    compiled = compile_step(step, weight.new_zeros(problem.B, problem.D), weight, targets)

    def launch(hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return compiled(hidden, weight, targets)

    return launch


PROVIDER = Provider(
    name="score_log_softmax_compiled",
    label="log_softmax and gather (compiled)",
    kind=Kind.SCORE,
    build=build,
    capabilities=STORED,
    presets=("score",),
)
