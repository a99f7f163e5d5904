"""`HeadCopy`: an int8 copy of an LM head, and bounds of its error (docs/guide/screened-head.md).

    w_v = scale_v code_v + r_v,   |r_v|_2 <= residual_v,   |scale_v code_v|_2 <= norm_v

`fsbench.kernels.screened.bounds` computes from these three numbers per token how far the logit of
the copy may be from the logit of the weight. They are computed in float64 and rounded upwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.identity import Keyed, Source
from fsbench.kernels.checks.tensors import check_dense, check_tensor, without_autocast
from fsbench.kernels.configs.screen import LARGEST_CODE, LARGEST_D, extra_bytes

LARGEST_ENTRY = 2.0**50
"""Rows with larger or undefined entries are not screened: a logit of two of them could overflow."""
SMALLEST_MAXIMUM = 2.0**-90
"""Rows below it, of hidden too, have codes of 0 and an error that is the row itself, so that no
product can underflow."""
_SMALLEST_RESIDUAL = 2.0**-110


_AT_ONCE = 1 << 24  # entries in float64: 128 MiB, and as much again for what is made of them


@dataclass(eq=False)
class HeadCopy(Keyed):
    """A weight and its int8 copy: the fields of screened.head.ScreenedHead.

    weight: [V, D] bf16, fp16 or (on a CPU) fp32.
    codes: int8 [V, D], -127 to 127.
    scale, residual, norm: fp32 [V], see the module. residual is +inf in a row that is not screened.

    If torch writes to the weight, calls refuse the head until it is refreshed or checked.
    checks.identity says which writes torch does not count; `check` finds those, too.
    """

    weight: Tensor
    codes: Tensor
    scale: Tensor
    residual: Tensor
    norm: Tensor

    instead = (
        "make another with prepare_head, of a copy of the weight, or write it with save_head and "
        "read it with load_head"
    )

    def __post_init__(self) -> None:
        self.source = Source(self.weight)
        self.register()

    @property
    def copy(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(codes, scale, residual, norm)."""
        return self.codes, self.scale, self.residual, self.norm

    @property
    def extra_bytes(self) -> int:
        """Bytes in addition to the weight: D + 12 per token."""
        return extra_bytes(*self.weight.shape)

    @without_autocast
    def refresh(self, weight: Tensor | None = None) -> None:
        """Make the copy again, in place, from the current values or from another weight.

        Replays of CUDA graphs that captured the head use the new copy, but still the address of
        the old weight. This takes as long as prepare_head.

        Raises:
            InvalidType, InvalidArgument: as prepare_head, or a weight of another shape, dtype or
                device than the head's.
        """
        old, new = self.weight, self.weight if weight is None else weight
        check_weight(new)
        check_tensor("weight", new, [old.dtype], [tuple(old.shape)], old.device)
        rows = max(1, _AT_ONCE // new.shape[1])
        self.source, values = Source(new), new.detach()
        for v in range(0, len(values), rows):
            parts = _quantized(values[v : v + rows].double())
            for whole, part in zip(self.copy, parts, strict=True):
                whole[v : v + rows] = part
        self.weight = new

    @without_autocast
    def check(self) -> None:
        """Compare every row of the weight with the copy, and accept the weight if all are bounded.

        A change within the bounds is harmless: every draw stays exact. This takes as long as
        prepare_head.

        Raises:
            InvalidArgument: the copy does not bound a row, or the parts do not fit each other.
        """
        check_copy(self, as_it_was=False)
        source = Source(self.weight)
        V, D = self.weight.shape
        rows = max(1, _AT_ONCE // D)
        for v in range(0, V, rows):
            whole = (self.weight, *self.copy)
            weight, *parts = (part.detach()[v : v + rows].double() for part in whole)
            wrong = (~_bounded(weight, *parts)).nonzero()
            if len(wrong):
                raise InvalidArgument(
                    "head: expected a copy that bounds its weight; got one that does not at row "
                    f"{v + int(wrong[0])}: the weight has changed since prepare_head"
                )
        self.source = source


def _quantized(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (codes, scale, residual, norm) of rows w, float64 [R, D]."""
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
    """Round float64 norms to fp32, not below the true norms.

    The D + 2 roundings of a norm, 2^-53 each, are below 2^-30 together.
    """
    inflated = values * (1 + 2.0**-30)
    rounded = inflated.float()
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < inflated, above, rounded)


def check_copy(head: object, as_it_was: bool = True) -> HeadCopy:
    """Return the head if its parts fit each other; their values are not read.

    as_it_was: whether to refuse a weight that torch has written to.

    Raises:
        InvalidType: no ScreenedHead, a part of another dtype, or as prepare_head.
        InvalidArgument: a part of another shape or on another device, a weight that has changed, or
            as prepare_head.
    """
    if not isinstance(head, HeadCopy):
        raise InvalidType(f"head: expected a ScreenedHead; got {type(head).__name__}")
    check_weight(head.weight)
    V, D = head.weight.shape
    device = head.weight.device
    check_tensor("head.codes", head.codes, [torch.int8], [(V, D)], device)
    for name in ("scale", "residual", "norm"):
        check_tensor(f"head.{name}", getattr(head, name), [torch.float32], [(V,)], device)
    if as_it_was:
        head.source.check("head", head.weight)
    return head


def _bounded(w: Tensor, codes: Tensor, scale: Tensor, residual: Tensor, norm: Tensor) -> Tensor:
    """Return whether the copy bounds each row of w, bool [R]. All arguments are float64."""
    copy = codes * scale[:, None]
    # prepare_head inflates by 2^-30, and float64 errs by less than 2^-35.
    inflation = 1 + 2.0**-31
    bounded = (w - copy).norm(dim=1) * inflation <= residual
    bounded &= copy.norm(dim=1) * inflation <= norm
    # Sums must not overflow.
    bounded &= torch.maximum(w.abs(), copy.abs()).amax(1) <= 2 * LARGEST_ENTRY
    bounded &= codes.amin(1) >= -LARGEST_CODE
    bounded &= residual >= _SMALLEST_RESIDUAL
    # With an infinite residual the screen assumes nothing about the row.
    return bounded | (residual == torch.inf)


def check_weight(weight: object) -> None:
    if not isinstance(weight, Tensor):
        got = type(weight).__name__
        raise InvalidType(f"weight: expected a tensor of bf16, fp16 or fp32; got {got}")
    check_dense("weight", weight)
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InvalidType(f"weight: expected a tensor of bf16, fp16 or fp32; got {weight.dtype}")
    if weight.ndim != 2 or 0 in weight.shape:
        raise InvalidArgument(f"weight: expected a non-empty matrix; got {list(weight.shape)}")
    if weight.shape[1] > LARGEST_D:
        raise InvalidArgument(f"weight: expected at most {LARGEST_D} columns; got {weight.shape}")
    if not weight.is_contiguous():
        raise InvalidArgument(f"weight: expected it contiguous; got strides {weight.stride()}")
