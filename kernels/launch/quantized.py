"""`QuantizedHead`: an LM head of one-byte numbers with their scales, and how one is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.autocast import without_autocast
from fsbench.kernels.checks.tensors import FLOATS, check_matrix, check_tensor
from fsbench.kernels.checks.values import check_flag, either

LARGEST_NUMBERS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of a quantized weight, and the largest number that is made of an entry."""
_SMALLEST_SCALE = 2.0**-126
_AT_ONCE = 1 << 24  # entries in float64: 128 MiB, and as much again for what is made of them


@dataclass(frozen=True, eq=False)
class QuantizedHead:
    """A head that is quantized itself: the logit of token v is scale[v] (hidden . weight[v]).

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
        if isinstance(self.scale, Tensor):
            _check_scale_shape(self.scale, len(weight))
        check_tensor("scale", self.scale, [torch.float32], [(len(weight),), ()], weight.device)


def _check_scale_shape(scale: Tensor, num_rows: int) -> None:
    """Refuse scales of blocks, which checkpoints of DeepSeek and compressed-tensors have."""
    if scale.ndim != 2:
        return
    advice = "scales per block are not supported: multiply the weight by its scales, and pass the "
    advice += "product in bf16 as the weight, or in fp32 to quantize_head"
    if scale.shape == (num_rows, 1):
        advice = "pass scale.flatten()"
    raise InvalidArgument(
        f"scale: expected one for each row, [{num_rows}], or one for the weight, []; got "
        f"{list(scale.shape)}: {advice}"
    )


@without_autocast
def quantize_head(
    weight: Tensor, dtype: torch.dtype = torch.int8, *, per_row: bool = True
) -> QuantizedHead:
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
    return QuantizedHead(rounded, scale)
