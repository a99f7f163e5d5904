"""What the baselines that score given tokens share: logits in memory, then log softmax at a token.

Seed and offset are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.logits import scaled_logits
from fsbench.problem import Problem
from fsbench.provider import Capabilities

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STORED = Capabilities(devices=("cuda", "cpu"), dtypes=("bf16", "fp16", "fp32"), host_sync_free=True)
"""Of a score from stored logits."""


def row_targets(problem: Problem, device: torch.device) -> Tensor:
    """int64 [B]: the problem's targets."""
    import torch

    return torch.tensor(problem.row_targets(), device=device)


def target_logprob(
    hidden: Tensor, weight: Tensor, V: int, temperature: float, targets: Tensor
) -> Tensor:
    """log softmax(logits / T) at targets int64 [B], fp32 [B]. weight: padded, [>= V, D]."""
    logits = scaled_logits(hidden, weight, V, temperature)
    return logits.log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
