"""`PreparedHead`: a weight with something made from it, that takes its place in public calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import Sample, TruncatedSample
from fsbench.kernels.shard.vocab_shard import VocabShard


class PreparedHead:
    """What a family of kernels keeps beside a weight, and whether it serves a request by it.

    flash_sample and truncated_sample know no more of such a family than this.
    """

    weight: Tensor

    def validate(self) -> None:
        """Refuse a head whose parts do not fit each other, or whose weight has changed.

        Raises:
            InvalidType, InvalidArgument: it is one.
        """
        raise NotImplementedError

    def choice(
        self, hidden: Tensor, vocab_size: int, top_k: int | Tensor | None = None
    ) -> tuple[str | None, str]:
        """(what would draw, as `describe` names it; or None for the fused kernel, and why).

        top_k: of a plain call of truncated_sample; None is one of flash_sample.
        """
        raise NotImplementedError

    def draw(self, request: Request, out: Sample) -> None:
        """Draw one token for each row, and nothing else, into `out`."""
        raise NotImplementedError

    def draw_filtered(self, request: Request, filters: Filters, out: TruncatedSample) -> None:
        """Draw one token for each row from what the filters keep, with token noise."""
        raise NotImplementedError


def drawn_from(weight: Any, shard: VocabShard | None) -> Any:
    """What `checked_request` takes for a weight, or for a prepared head, maybe of a shard's rows.

    Raises:
        InvalidType, InvalidArgument: shard is no VocabShard, comes without a prepared head, or has
            other rows than the head.
    """
    head = weight if isinstance(weight, PreparedHead) else None
    if shard is None:
        return weight if head is None else head.weight
    if not isinstance(shard, VocabShard):
        raise InvalidType(f"shard: expected a VocabShard; got {type(shard).__name__}")
    if head is None:
        raise InvalidArgument(
            "shard: expected it with a ScreenedHead only; got it with a "
            f"{type(weight).__name__}: a VocabShard itself takes the place of the weight"
        )
    if head.weight is not shard.weight:
        raise InvalidArgument(
            f"head: expected one of shard.weight, {list(shard.weight.shape)}, which begins at "
            f"token {shard.first_token}; got one of another weight, {list(head.weight.shape)}: "
            "make it by prepare_head(shard.weight), or call head.refresh(shard.weight)"
        )
    return shard
