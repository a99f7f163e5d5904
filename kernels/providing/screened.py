"""Launches and limits of the samplers with a screened head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.kernels.configs.screen import LARGEST_D, extra_bytes
from fsbench.kernels.providing.launches import CallLaunch, matrix, vocab_shard
from fsbench.problem import Problem
from fsbench.provider import Shard

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.configs.screen import HopperScreenConfig, ScreenConfig
    from fsbench.kernels.screened.head import ScreenedHead
    from fsbench.kernels.shard.vocab_shard import VocabShard


def kept_bytes(problem: Problem) -> int:
    """Return the bytes of the int8 copy of a rank's rows and their bounds."""
    return extra_bytes(-(-problem.V // problem.tp), problem.D)


def unsupported_reason(problem: Problem) -> str | None:
    """Return why a problem is not supported, or None."""
    if problem.D > LARGEST_D:
        return f"takes D up to {LARGEST_D}: sums of products of bytes must fit int32"
    return None


class ScreenedLaunch(CallLaunch):
    """screened_sample; it makes the int8 copy if the head lacks one.

    Args:
        temperature: None for the problem's.
        config: Tile shapes of the screen; None for the default.
    """

    def __init__(
        self,
        problem: Problem,
        head: Tensor | VocabShard | ScreenedHead,
        temperature: float | None = None,
        config: ScreenConfig | HopperScreenConfig | None = None,
    ):
        from fsbench.kernels.configs.screen_choice import default_configs
        from fsbench.kernels.screened.api import screened_sample
        from fsbench.kernels.screened.head import ScreenedHead, prepare_head
        from fsbench.kernels.shard.vocab_shard import VocabShard

        screened = head if isinstance(head, ScreenedHead) else prepare_head(matrix(head))
        default, resolve = default_configs(problem.B, problem.D, screened.weight.device)
        options: dict[str, Any] = {
            "temperature": problem.temperature if temperature is None else temperature,
            "shard": head if isinstance(head, VocabShard) else None,
            # With None repeated calls skip their checks.
            "configs": None if config is None else (config, resolve),
        }
        super().__init__(screened_sample, problem, screened, **options)
        self.config = f"{config or default} {resolve}"


def build_sharded(problem: Problem, shard: Shard) -> ScreenedLaunch:
    """Build the launch on a rank's rows (Provider.build_sharded)."""
    return ScreenedLaunch(problem, vocab_shard(shard))
