"""Log-probabilities of given tokens by the kernel that draws: `fsbench.kernels.score`.

The logits never reach memory. The bits are those that flash_sample returns for the same tokens
(docs/log-probabilities.md). Seed and offset are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.kernels.providing.launches import WorkspaceLaunch
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.call.result import Score


def score(*arguments: Any, **named: Any) -> Score:
    """fsbench.kernels.score, loaded when it is called."""
    from fsbench.kernels.scoring.api import score

    return score(*arguments, **named)


class FlashScore(WorkspaceLaunch):
    """`score` of the problem's targets, at its temperature."""

    def __init__(self, problem: Problem, weight: Tensor):
        import torch

        from fsbench.kernels.fused.api import describe

        super().__init__(problem, weight)
        self._targets = torch.tensor(problem.row_targets(), device=weight.device)
        self.config = describe(weight.new_empty(problem.B, problem.D), weight)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return score(hidden, self._weight, self._targets, temperature=self._temperature).logprob


PROVIDER = Provider(
    name="flash_score",
    label="FlashSampling, score",
    kind=Kind.SCORE,
    requires=("triton",),
    capabilities=Capabilities(
        fused=True,
        host_sync_free=True,
        per_row_temperature=True,
        greedy_rows=True,
        mask=True,
        logprob=True,
        entropy=True,
        rank=True,
    ),
    build=FlashScore,
    score=score,
    call="score",
    presets=("score",),
)
