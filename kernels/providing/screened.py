"""What the samplers with a screened head share as providers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.kernels.providing.launches import WorkspaceLaunch, matrix, vocab_shard
from fsbench.kernels.screened.sizes import LARGEST_D, extra_bytes
from fsbench.problem import Problem
from fsbench.provider import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.shard.vocab_shard import VocabShard


def kept_bytes(problem: Problem) -> int:
    """See Provider: the int8 copy of a rank's rows and their bounds."""
    return extra_bytes(-(-problem.V // problem.tp), problem.D)


def unsupported_reason(problem: Problem) -> str | None:
    """See Provider."""
    if problem.D > LARGEST_D:
        return f"takes D up to {LARGEST_D}: sums of products of bytes must fit int32"
    return None


class ScreenedLaunch(WorkspaceLaunch):
    """screened_sample at the problem's temperature or another; the copy is made here."""

    def __init__(
        self, problem: Problem, head: Tensor | VocabShard, temperature: float | None = None
    ):
        from fsbench.kernels.configs.screen import default_configs
        from fsbench.kernels.screened.head import prepare_head
        from fsbench.kernels.shard.vocab_shard import VocabShard

        weight = matrix(head)
        super().__init__(problem, weight)
        self._shard = head if isinstance(head, VocabShard) else None
        self._head = prepare_head(weight)
        if temperature is not None:
            self._temperature = temperature
        screen, resolve = default_configs(problem.B, problem.D, weight.device)
        self.config = f"{screen} {resolve}"

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels.screened.api import screened_sample

        return screened_sample(
            hidden,
            self._head,
            shard=self._shard,
            temperature=self._temperature,
            seed=seed,
            offset=offset,
        ).tokens


def build_sharded(problem: Problem, shard: Shard) -> ScreenedLaunch:
    """See Provider."""
    return ScreenedLaunch(problem, vocab_shard(shard))
