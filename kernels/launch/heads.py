"""`PreparedHead`: the interface of weights with derived data, such as an int8 copy."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import Sample, TruncatedSample
from fsbench.kernels.shard.vocab_shard import VocabShard


class PreparedHead:
    """A weight with derived data, which `flash_sample` and `truncated_sample` take as a weight.

    A family of kernels implements it and decides which requests it serves.
    """

    weight: Tensor

    def validate(self) -> None:
        """Check that the parts of the head match and that the weight has not changed.

        Raises:
            InvalidType, InvalidArgument: they do not match, or the weight has changed.
        """
        raise NotImplementedError

    def choice(
        self,
        hidden: Tensor,
        vocab_size: int,
        top_k: int | Tensor | None = None,
        all_greedy: bool = False,
    ) -> tuple[str | None, str]:
        """Return (the kernel as `describe` names it, or None for the fused kernel; the reason).

        top_k: k of a call of truncated_sample; None for a call of flash_sample.
        all_greedy: Whether no row needs noise.
        """
        raise NotImplementedError

    def draw(self, request: Request, out: Sample) -> None:
        """Draw one token for each row and write tokens and valid to `out`."""
        raise NotImplementedError

    def draw_filtered(self, request: Request, filters: Filters, out: TruncatedSample) -> None:
        """Draw one token for each row from the tokens that the filters keep, with token noise."""
        raise NotImplementedError


def drawn_from(weight: Any, shard: VocabShard | None) -> Any:
    """Return the weight, or the shard, of a prepared head; another weight is returned unchanged.

    Raises:
        InvalidType, InvalidArgument: shard is not a VocabShard, was passed without a prepared head,
            or its weight is not the head's.
    """
    head = weight if isinstance(weight, PreparedHead) else None
    if shard is None:
        return weight if head is None else head.weight
    if not isinstance(shard, VocabShard):
        raise InvalidType(f"shard: expected a VocabShard; got {type(shard).__name__}")
    if head is None:
        raise InvalidArgument(
            "shard: expected it with a ScreenedHead only; got it with a "
            f"{type(weight).__name__}: pass the VocabShard as the weight"
        )
    if head.weight is not shard.weight:
        raise InvalidArgument(
            f"head: expected one of shard.weight, {list(shard.weight.shape)}, which begins at "
            f"token {shard.first_token}; got one of another weight, {list(head.weight.shape)}: "
            "make it by prepare_head(shard.weight), or call head.refresh(shard.weight)"
        )
    return shard
