"""What the samplers with a screened head share as providers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.kernels.configs.screen import LARGEST_D, extra_bytes
from fsbench.kernels.providing.launches import WorkspaceLaunch, matrix, vocab_shard
from fsbench.problem import Problem
from fsbench.provider import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.configs.screen import HopperScreenConfig, ScreenConfig
    from fsbench.kernels.screened.head import ScreenedHead
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
    """screened_sample at the problem's temperature or another.

    The copy is made here, of a head that has none. config: of the screen, in place of that in use.
    """

    def __init__(
        self,
        problem: Problem,
        head: Tensor | VocabShard | ScreenedHead,
        temperature: float | None = None,
        config: ScreenConfig | HopperScreenConfig | None = None,
    ):
        from fsbench.kernels.configs.screen_choice import default_configs
        from fsbench.kernels.screened.head import ScreenedHead, prepare_head
        from fsbench.kernels.shard.vocab_shard import VocabShard

        self._head = head if isinstance(head, ScreenedHead) else prepare_head(matrix(head))
        super().__init__(problem, self._head.weight)
        self._shard = head if isinstance(head, VocabShard) else None
        if temperature is not None:
            self._temperature = temperature
        in_use, resolve = default_configs(problem.B, problem.D, self._head.weight.device)
        # Without a config a call is plain: it goes past its checks when it is repeated.
        self._configs = None if config is None else (config, resolve)
        self.config = f"{config or in_use} {resolve}"

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels.screened.api import screened_sample

        return screened_sample(
            hidden,
            self._head,
            shard=self._shard,
            configs=self._configs,
            temperature=self._temperature,
            seed=seed,
            offset=offset,
        ).tokens


def build_sharded(problem: Problem, shard: Shard) -> ScreenedLaunch:
    """See Provider."""
    return ScreenedLaunch(problem, vocab_shard(shard))
