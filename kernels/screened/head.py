"""`ScreenedHead`: an int8 copy of an LM head, with what bounds its error; docs/screened-head.md.

    w_v = scale_v code_v + r_v,   |r_v|_2 <= residual_v,   |scale_v code_v|_2 <= norm_v

so that a logit is known from the copy within what `fsbench.kernels.screened.bounds` makes of these
three numbers per token. They are computed in float64 and rounded upwards.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.tensors import check_tensor
from fsbench.kernels.screened.sizes import LARGEST_CODE, LARGEST_D, extra_bytes

LARGEST_ENTRY = 2.0**50
"""Rows with larger or undefined entries are not screened: a logit of two such could overflow."""
SMALLEST_MAXIMUM = 2.0**-90
"""Rows below it, of hidden too, have codes of 0 and are all error: no product can underflow."""
_SMALLEST_RESIDUAL = 2.0**-110


_AT_ONCE = 1 << 24  # entries in float64: 128 MiB, and as much again for what is made of them


class ScreenedHead(NamedTuple):
    """A weight and its int8 copy; made by prepare_head or load_head.

    weight: [V, D] bf16, fp16 or (on a CPU) fp32, the head itself.
    codes: int8 [V, D], -127 to 127.
    scale, residual, norm: fp32 [V], see the module. residual is +inf in a row that is not screened.
    """

    weight: Tensor
    codes: Tensor
    scale: Tensor
    residual: Tensor
    norm: Tensor

    @property
    def extra_bytes(self) -> int:
        """Memory beside the weight: D + 12 bytes a token, half of a 16-bit weight and 12 bytes."""
        return extra_bytes(*self.weight.shape)


def prepare_head(weight: Tensor) -> ScreenedHead:
    """Make the int8 copy of weight [V, D] on its device.

    A scale is the row's largest entry over 127. The weight must not change afterwards: the
    bounds are those of the values it has now, and screened_sample does not look whether it has
    others (save_head and load_head do). The copy has no gradient.

    Raises:
        InvalidType: not a matrix of bf16, fp16 or fp32. InvalidArgument: empty, not contiguous,
            or of more than 131,072 columns.
    """
    check_weight(weight)
    V, D = weight.shape
    head = ScreenedHead(
        weight,
        torch.empty(V, D, dtype=torch.int8, device=weight.device),
        *(torch.empty(V, dtype=torch.float32, device=weight.device) for _ in range(3)),
    )
    rows = max(1, _AT_ONCE // D)
    values = weight.detach()
    for v in range(0, V, rows):
        parts = _quantized(values[v : v + rows].double())
        for whole, part in zip(head[1:], parts, strict=True):
            whole[v : v + rows] = part
    return head


def _quantized(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scale, residual, norm) of rows w, float64 [R, D]."""
    largest = w.abs().amax(1)
    # The comparison is false for NaN too.
    screened = largest <= LARGEST_ENTRY
    w = torch.where(screened[:, None], w, 0.0)
    scale = (largest / LARGEST_CODE).float()
    scale = torch.where(screened & (largest >= SMALLEST_MAXIMUM), scale, 0.0)
    divisor = torch.where(scale > 0, scale, torch.inf).double()[:, None]
    codes = (w / divisor).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    copy = codes * scale.double()[:, None]
    residual = _upwards((w - copy).norm(dim=1)).clamp_min(_SMALLEST_RESIDUAL)
    residual = torch.where(screened, residual, torch.inf)
    return codes.to(torch.int8), scale, residual, _upwards(copy.norm(dim=1))


def _upwards(values: Tensor) -> Tensor:
    """float64 norms -> fp32, not below the true ones: D + 2 roundings of 2^-53 are below 2^-30."""
    inflated = values * (1 + 2.0**-30)
    rounded = inflated.float()
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < inflated, above, rounded)


def check_copy(head: object) -> ScreenedHead:
    """The head itself, if its parts fit each other; their values are not looked at.

    Raises:
        InvalidType: no ScreenedHead, or a part of another dtype. InvalidArgument: a part of
            another shape or on another device. Both also as prepare_head.
    """
    if not isinstance(head, ScreenedHead):
        raise InvalidType(f"head: expected a ScreenedHead; got {type(head).__name__}")
    check_weight(head.weight)
    V, D = head.weight.shape
    device = head.weight.device
    check_tensor("head.codes", head.codes, [torch.int8], [(V, D)], device)
    for name in ("scale", "residual", "norm"):
        check_tensor(f"head.{name}", getattr(head, name), [torch.float32], [(V,)], device)
    return head


def unbounded_row(head: ScreenedHead) -> int | None:
    """The first row of the weight that its copy does not bound as above; None if there is none.

    As long as prepare_head takes. A weight that changed within its bounds still has all of them.
    """
    V, D = head.weight.shape
    rows = max(1, _AT_ONCE // D)
    for v in range(0, V, rows):
        weight, *parts = (part.detach()[v : v + rows].double() for part in head)
        wrong = (~_bounded(weight, *parts)).nonzero()
        if len(wrong):
            return v + int(wrong[0])
    return None


def _bounded(w: Tensor, codes: Tensor, scale: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
    """Whether rows w are bounded by what the copy says of them, bool [R]; all is float64."""
    copy = codes * scale[:, None]
    # prepare_head inflates by 2^-30, and float64 errs by less than 2^-35.
    inflation = 1 + 2.0**-31
    bounded = (w - copy).norm(dim=1) * inflation <= residual
    bounded &= copy.norm(dim=1) * inflation <= norm
    # What keeps sums below an overflow.
    bounded &= torch.maximum(w.abs(), copy.abs()).amax(1) <= 2 * LARGEST_ENTRY
    bounded &= codes.amin(1) >= -LARGEST_CODE
    bounded &= residual >= _SMALLEST_RESIDUAL
    # With an infinite one nothing is taken for known.
    return bounded | (residual == torch.inf)


def check_weight(weight: object) -> None:
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    if not isinstance(weight, torch.Tensor) or weight.dtype not in dtypes:
        got = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise InvalidType(f"weight: expected a tensor of bf16, fp16 or fp32; got {got}")
    if weight.ndim != 2 or 0 in weight.shape:
        raise InvalidArgument(f"weight: expected a non-empty matrix; got {list(weight.shape)}")
    if weight.shape[1] > LARGEST_D:
        raise InvalidArgument(f"weight: expected at most {LARGEST_D} columns; got {weight.shape}")
    if not weight.is_contiguous():
        raise InvalidArgument(f"weight: expected it contiguous; got strides {weight.stride()}")
