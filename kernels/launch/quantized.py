"""`QuantizedHead`: an LM head of int8 or fp8 weights with scales; `quantize_head` makes one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.tensors import FLOATS, check_matrix, check_tensor, without_autocast
from fsbench.kernels.checks.values import check_flag, either

LARGEST_NUMBERS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes of a quantized weight, and the largest number of each."""
_SMALLEST_SCALE = 2.0**-126
_AT_ONCE = 1 << 24  # entries that are converted at once: 128 MiB in float64, twice


@dataclass(frozen=True, eq=False)
class QuantizedHead:
    """A quantized LM head: the logit of token v is scale[v] (hidden . weight[v]).

    Args:
        weight: int8 or float8_e4m3fn [V, D], contiguous.
        scale: fp32 [V], or a scalar tensor for the whole weight, on the same device. A scale that
            is negative or not finite makes the logits of its tokens NaN, so that no row has a draw.
            The host does not read the scales.

    Raises:
        InvalidType, InvalidArgument: a wrong type, dtype, shape, layout or device.
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
    """Raise InvalidArgument for scales per block, as in DeepSeek and compressed-tensors."""
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

    A scale is the largest absolute value of the row (with per_row=False of the weight), divided by
    127 or 448. The host waits for the GPU once. The result has no gradient, and later changes of
    the weight do not affect it.

    Raises:
        InvalidType: weight is not bf16, fp16 or fp32, or dtype is not one of the two.
        InvalidArgument: weight is not a matrix, empty, not contiguous, or has a non-finite entry.
    """
    weight = check_matrix("weight", weight)
    check_tensor("weight", weight, FLOATS, [tuple(weight.shape)], weight.device)
    if dtype not in LARGEST_NUMBERS:
        raise InvalidType(f"dtype: expected {either([*LARGEST_NUMBERS])}; got {dtype}")
    blocks = weight.detach().split(max(1, _AT_ONCE // weight.shape[1]))
    largest = torch.cat([block.abs().amax(1) for block in blocks]).double()
    not_finite = (~largest.isfinite()).nonzero()
    if len(not_finite):
        raise InvalidArgument(
            f"weight: expected finite entries; got NaN or inf in row {int(not_finite[0])}"
        )
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
