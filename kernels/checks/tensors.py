"""Checks of tensors, before anything is allocated or launched.

The checks read types, dtypes, shapes, strides and devices, but no values of a tensor: that would
wait for the GPU. They also run under torch.compile, where they cost nothing at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels.checks.values import check_number, either

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_autocast(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return the function with torch.autocast switched off inside it, for CPU and GPU tensors.

    A public call computes in its documented dtypes, whatever autocast would choose.
    """

    @wraps(function)
    def exact(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return function(*arguments, **options)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*arguments, **options)

    return exact


def check_dense(name: str, value: object) -> Tensor:
    """Return value if it is a tensor that is neither sparse nor nested.

    Raises:
        InvalidType: not a tensor. InvalidArgument: another layout.
    """
    if not isinstance(value, Tensor):
        raise InvalidType(f"{name}: expected a tensor; got {type(value).__name__}")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise InvalidArgument(f"{name}: expected a dense tensor; got one that is {kind}")
    return value


def check_no_gradients(arguments: Iterable[tuple[str, object]]) -> None:
    """Refuse tensors that require a gradient while autograd is on: the call computes no gradient.

    Args:
        arguments: (name, value) of each argument; values of other types are accepted. Without
            autograd none is looked at.

    Raises:
        InvalidArgument: the first such tensor.
    """
    if not torch.is_grad_enabled():
        return
    for name, value in arguments:
        if isinstance(value, Tensor) and value.requires_grad:
            raise InvalidArgument(
                f"{name}: expected a tensor that requires no gradient, as this call has none; got "
                "one that does: make the call under torch.no_grad(), and take the gradient from "
                "another loss"
            )


def check_tensor(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
) -> Tensor:
    """Return value if it is a contiguous tensor of one of the dtypes and shapes, on the device.

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
        expected = either([list(shape) for shape in dict.fromkeys(shapes)])
        raise InvalidArgument(f"{name}: expected shape {expected}; got {list(value.shape)}")
    if value.device != device:
        raise InvalidArgument(f"{name}: expected it on {device} as the others; got {value.device}")
    if not value.is_contiguous():
        raise InvalidArgument(f"{name}: expected it contiguous; got strides {value.stride()}")
    return value


def check_matrix(name: str, value: object, rows: int = 1) -> Tensor:
    """Return value if it is a matrix with at least `rows` rows and one column."""
    value = check_dense(name, value)
    if value.ndim != 2 or value.shape[0] < rows or value.shape[1] == 0:
        raise InvalidArgument(f"{name}: expected a non-empty matrix; got {list(value.shape)}")
    return value


def check_matrices(
    hidden: object, weight: object, dtypes: Sequence[torch.dtype] = ()
) -> tuple[Tensor, Tensor]:
    """Return hidden [B, D] and weight [V, D] if they have one floating dtype and one device.

    Args:
        hidden, weight: the matrices; only B may be 0.
        dtypes: the dtypes that weight may have; by default hidden's.
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
    """Return value if it is a finite number >= 0, or fp32 [B]."""
    if isinstance(value, Tensor):
        return check_tensor("temperature", value, [torch.float32], [(B,)], device)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f"temperature: expected a number or a tensor; got {type(value).__name__}")
    return check_number("temperature", value)


def check_top_k(value: object, B: int, V: int, device: torch.device) -> int | Tensor:
    """Return top-k as an integer in [0, V), where 0 is off; or as int32 or int64 [B]."""
    if isinstance(value, Tensor):
        return check_tensor("top_k", value, [torch.int32, torch.int64], [(B,)], device)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"top_k: expected an integer; got {type(value).__name__}")
    # A negative k is off, as in other libraries, and so is a k that keeps all V tokens.
    return value if 0 < value < V else 0


def check_mask(value: object, B: int, V: int, device: torch.device) -> Tensor:
    """Return value if it is bool [B, V], or int32 [B, W] with W >= ceil(V / 32)."""
    if isinstance(value, Tensor) and value.dtype == torch.int32:
        words = -(-V // 32)
        if value.ndim == 2 and value.shape[1] > words:  # a padded vocabulary
            words = value.shape[1]
        return check_tensor("mask", value, [torch.int32], [(B, words)], device)
    return check_tensor("mask", value, [torch.bool, torch.int32], [(B, V)], device)


def check_bias(value: object, B: int, V: int, device: torch.device) -> Tensor:
    """Return value if it is bf16, fp16 or fp32, [V] or [B, V]."""
    return check_tensor("bias", value, FLOATS, [(V,), (B, V)], device)


def as_counter(name: str, value: Any, hidden: object) -> Any:
    """Return a seed or an offset as int64, [1] for an integer, on the device of hidden.

    An integer from 2^63 on, or uint64, has the int64 of the same bits. Other values are returned as
    they are, for `check_counter` to refuse.

    Raises:
        InvalidArgument: an integer of more than 64 bits.
    """
    if isinstance(value, Tensor):
        if value.dtype == torch.uint64:
            return value.view(torch.int64)
        return value.long() if value.dtype in (torch.int32, torch.uint32) else value
    if type(value) is not int or not isinstance(hidden, Tensor):
        return value
    if not -(2**63) <= value < 2**64:
        raise InvalidArgument(f"{name}: expected an integer of at most 64 bits; got {value}")
    signed = value if value < 2**63 else value - 2**64
    return torch.full((1,), signed, dtype=torch.int64, device=hidden.device)


def check_counter(name: str, value: object, B: int, device: torch.device) -> Tensor:
    """Return value if it is int64, [1] or [B]."""
    if not isinstance(value, Tensor):
        got = type(value).__name__
        raise InvalidType(f"{name}: expected an integer or a tensor; got {got}")
    return check_tensor(name, value, [torch.int64], [(1,), (B,)], device)
