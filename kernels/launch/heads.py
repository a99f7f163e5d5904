"""What takes the place of a weight: `PreparedHead` and `QuantisedHead`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.autocast import without_autocast
from fsbench.kernels.checks.tensors import FLOATS, check_matrix, check_tensor
from fsbench.kernels.checks.values import check_flag, either
from fsbench.kernels.shard.vocab_shard import VocabShard

if TYPE_CHECKING:
    from fsbench.kernels.launch.request import Filters, Request
    from fsbench.kernels.launch.result import Sample, TruncatedSample

LARGEST_NUMBERS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of a quantised weight, and the largest number that is made of an entry."""
_SMALLEST_SCALE = 2.0**-126
_AT_ONCE = 1 << 24  # entries in float64: 128 MiB, and as much again for what is made of them


@dataclass(frozen=True, eq=False)
class QuantisedHead:
    """A head that is quantised itself: the logit of token v is scale[v] (hidden . weight[v]).

    weight: [V, D] int8 or float8_e4m3fn, contiguous.
    scale: fp32 [V], or of no dimension for the whole weight, on its device. One that is negative
        or not finite makes the logits of its tokens NaN, so that no row has a draw; the host does
        not look.

    Raises:
        InvalidType, InvalidArgument: a part of another type, dtype, shape, layout or device.
    """

    weight: Tensor
    scale: Tensor

    def __post_init__(self) -> None:
        weight = check_matrix("weight", self.weight)
        check_tensor("weight", weight, [*LARGEST_NUMBERS], [tuple(weight.shape)], weight.device)
        check_tensor("scale", self.scale, [torch.float32], [(len(weight),), ()], weight.device)


@without_autocast
def quantise_head(
    weight: Tensor, dtype: torch.dtype = torch.int8, *, per_row: bool = True
) -> QuantisedHead:
    """Round weight [V, D] to int8 or float8_e4m3fn on its device.

    A scale is the largest entry of the row, or with per_row=False of the weight, over 127 or 448.
    It waits for the GPU, once. The result has no gradient, and does not follow the weight.

    Raises:
        InvalidType: not a matrix of bf16, fp16 or fp32, or a dtype that is none of the two.
        InvalidArgument: empty, not contiguous, or with an entry that is not finite.
    """
    weight = check_matrix("weight", weight)
    check_tensor("weight", weight, FLOATS, [tuple(weight.shape)], weight.device)
    if dtype not in LARGEST_NUMBERS:
        raise InvalidType(f"dtype: expected {either([*LARGEST_NUMBERS])}; got {dtype}")
    blocks = weight.detach().split(max(1, _AT_ONCE // weight.shape[1]))
    largest = torch.cat([block.abs().amax(1) for block in blocks]).double()
    wrong = (~largest.isfinite()).nonzero()
    if len(wrong):
        raise InvalidArgument(f"weight: expected finite entries; got others in row {int(wrong[0])}")
    if not check_flag("per_row", per_row):
        largest = largest.amax()
    scale = (largest / LARGEST_NUMBERS[dtype]).float().clamp_min(_SMALLEST_SCALE)
    divisors = scale.double().expand(len(weight)).split(len(blocks[0]))
    rounded = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for block, divisor, into in zip(blocks, divisors, rounded.split(len(blocks[0])), strict=True):
        entries = block.double() / divisor[:, None]
        if dtype == torch.int8:
            entries = entries.round()
        into.copy_(entries.clamp(-LARGEST_NUMBERS[dtype], LARGEST_NUMBERS[dtype]))
    return QuantisedHead(rounded, scale)


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
        self, hidden: Tensor, vocab_size: int, noise: str, top_k: int | Tensor | None = None
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
