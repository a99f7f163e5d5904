"""Checks of tensors, before anything is allocated or launched.

Only types, dtypes, shapes, strides and devices are looked at, never a tensor's values: that would
wait for the GPU. It runs under torch.compile too, where the checks cost nothing at run time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.values import check_number, either

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check_dense(name: str, value: object) -> Tensor:
    """Return the tensor itself, if it is one, neither sparse nor nested.

    Raises:
        InvalidType: not a tensor. InvalidArgument: another layout.
    """
    if not isinstance(value, Tensor):
        raise InvalidType(f"{name}: expected a tensor; got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise InvalidArgument(f"{name}: expected a dense tensor; got one that is {kind}")
    return value


def check_tensor(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> Tensor:
    """The tensor itself, if it is contiguous and has one of the dtypes and shapes, on the device.

    Raises:
        InvalidType: not a tensor, or of another dtype. InvalidArgument: anything else.
    """
    value = check_dense(name, value)
    if value.dtype not in dtypes:
        raise InvalidType(f"{name}: expected dtype {either(dtypes)}; got {value.dtype}")
    for shape in shapes:  # not `in shapes`, which torch.compile gets wrong for dynamic shapes
        if value.shape == shape:
            break
    else:
        wanted = either([list(shape) for shape in dict.fromkeys(shapes)])
        raise InvalidArgument(f"{name}: expected shape {wanted}; got {list(value.shape)}")
    if value.device != device:
        raise InvalidArgument(f"{name}: expected it on {device} as the others; got {value.device}")
    if not value.is_contiguous():
        raise InvalidArgument(f"{name}: expected it contiguous; got strides {value.stride()}")
    return value


def check_matrix(name: str, value: object, rows: int = 1) -> Tensor:
    """The tensor itself, if it has two dimensions, so many rows or more, and a column."""
    value = check_dense(name, value)
    if value.ndim != 2 or value.shape[0] < rows or value.shape[1] == 0:
        raise InvalidArgument(f"{name}: expected a non-empty matrix; got {list(value.shape)}")
    return value


def check_matrices(
    hidden: object, weight: object, dtypes: Sequence[torch.dtype] = ()
) -> tuple[Tensor, Tensor]:
    """hidden [B, D] and weight [V, D], of one floating dtype and device; B alone may be 0.

    dtypes: of the weight, in place of that of hidden.
    """
    hidden, weight = check_matrix("hidden", hidden, 0), check_matrix("weight", weight)
    device, shape, rows = hidden.device, hidden.shape, weight.shape[0]
    if not (hidden.is_cuda or hidden.is_cpu):
        raise InvalidArgument(f"hidden: expected it on cuda or cpu; got {device}")
    check_tensor("hidden", hidden, FLOATS[:2] if hidden.is_cuda else FLOATS, [shape], device)
    check_tensor("weight", weight, dtypes or [hidden.dtype], [(rows, shape[1])], device)
    if rows >= 2**31 - 256:
        raise InvalidArgument(f"weight: expected fewer than 2^31 - 256 rows; got {rows}")
    return hidden, weight


def check_temperature(value: object, B: int, device: torch.device) -> float | Tensor:
    """A finite number >= 0, or fp32 [B]."""
    if isinstance(value, Tensor):
        return check_tensor("temperature", value, [torch.float32], [(B,)], device)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"temperature: expected a number or a tensor; got {type(value).__name__}")
    return check_number("temperature", value)


def check_top_k(name: str, value: object, B: int, V: int, device: torch.device) -> int | Tensor:
    """An integer in [0, V), 0 if it is off; or int32 or int64 [B]."""
    if isinstance(value, Tensor):
        return check_tensor(name, value, [torch.int32, torch.int64], [(B,)], device)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"{name}: expected an integer; got {type(value).__name__}")
    # What is below 0 is off, as in other libraries; so is what keeps all V tokens.
    return value if 0 < value < V else 0


def check_mask(value: object, B: int, V: int, device: torch.device) -> Tensor:
    """bool [B, V], or int32 [B, at least ceil(V / 32)]."""
    if isinstance(value, Tensor) and value.dtype == torch.int32:
        words = -(-V // 32)
        if value.ndim == 2 and value.shape[1] > words:  # of a padded vocabulary
            words = value.shape[1]
        return check_tensor("mask", value, [torch.int32], [(B, words)], device)
    return check_tensor("mask", value, [torch.bool, torch.int32], [(B, V)], device)


def check_bias(value: object, B: int, V: int, device: torch.device) -> Tensor:
    """Any floating dtype, [V] or [B, V]."""
    return check_tensor("bias", value, FLOATS, [(V,), (B, V)], device)


def check_counter(name: str, value: object, B: int, device: torch.device) -> Tensor:
    """int64 [1] or [B]."""
    return check_tensor(name, value, [torch.int64], [(1,), (B,)], device)
