"""Log-probabilities of given tokens by the kernel of flash_sample: `fsbench.kernels.score`.

The logits never reach memory. The bits are those that flash_sample returns for the same tokens
(docs/guide/log-probabilities.md). Seed and offset are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.kernels.providing.launches import WorkspaceLaunch, empty_hidden, matrix, public_head
from fsbench.problem import QUANTIZED, Problem
from fsbench.provider import Capabilities, Kind, Provider, QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.launch.result import Score


def score(hidden: Tensor, weight: Any, targets: Tensor, **options: Any) -> Score:
    """Import fsbench.kernels.score and call it."""
    from fsbench.kernels.scoring.api import score

    return score(hidden, public_head(weight), targets, **options)


class FlashScore(WorkspaceLaunch):
    """Launch `score` for the problem's targets, at its temperature."""

    def __init__(self, problem: Problem, weight: Tensor | QuantizedWeight):
        import torch

        from fsbench.kernels.fused.api import describe

        self._head = public_head(weight)
        super().__init__(problem, matrix(self._head))
        device = self._weight.device
        self._targets = torch.tensor(problem.row_targets(), device=device)
        self.config = describe(empty_hidden(problem, device), self._head, return_logprob=True)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return score(hidden, self._head, self._targets, temperature=self._temperature).logprob


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
        quantized=QUANTIZED,
    ),
    build=FlashScore,
    score=score,
    call="score",
    presets=("score",),
)
