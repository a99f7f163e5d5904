"""Memcheck for Triton's interpreter: a kernel may touch the tensors of its launch, and no more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from torch import Tensor
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


class _Ranges:
    """Addresses of the tensors of a launch, as ranges in order that do not overlap."""

    def __init__(self, arguments: object) -> None:
        ranges: list[list[int]] = []
        for tensor in _tensors(arguments):
            last = sum(
                (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            first = tensor.data_ptr()
            if tensor.numel():
                ranges.append([first, first + (last + 1) * tensor.element_size()])
        merged: list[list[int]] = []
        for start, end in sorted(ranges):
            if merged and start <= merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        self.starts = np.array([start for start, _ in merged], dtype=np.uint64)
        self.ends = np.array([end for _, end in merged], dtype=np.uint64)

    def check(self, act: str, pointers, active=None) -> None:
        """Fail if an active pointer, of elements of its type, leaves all tensors."""
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        addresses = np.asarray(pointers.data, dtype=np.uint64)
        if active is not None:
            addresses = addresses[np.broadcast_to(active.data, addresses.shape).astype(bool)]
        place = np.searchsorted(self.starts, addresses, side="right")
        has_start = place > 0
        ends = self.ends[np.maximum(place, 1) - 1]
        outside = ~has_start | (addresses + np.uint64(size) > ends)
        if outside.any():
            first = int(addresses[outside].flat[0])
            far = min(
                (abs(first - int(edge)) for edge in (*self.starts, *self.ends)), default=first
            )
            raise AssertionError(
                f"{act} of {int(outside.sum())} elements outside of all tensors, the first "
                f"{far} bytes away"
            )


def _tensors(argument: object) -> Iterator[Tensor]:
    if isinstance(argument, TensorDescriptor):
        yield from _tensors(argument.base)
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from _tensors(part)
    elif isinstance(argument, Tensor):
        yield argument


@contextmanager
def within_tensors() -> Iterator[list[int]]:
    """Launches inside fail where a read, a write or an atomic leaves the tensors they were given.

    Yields a list to which every launch adds how often it went to memory.
    """
    builder, launches = interpreter.InterpreterBuilder, []
    of_launch: list[_Ranges] = []
    start = interpreter.GridExecutor._init_args_hst

    def starting(self, args_dev, kwargs):
        on_host = start(self, args_dev, kwargs)
        args, named = on_host
        of_launch[:] = [_Ranges([*args, *named.values()])]
        launches.append(0)
        return on_host

    def watched(name: str, act: str, pointer: int, mask: int | None):
        original = getattr(builder, name)

        def checked(self, *args, **kwargs):
            launches[-1] += 1
            of_launch[0].check(act, args[pointer], None if mask is None else args[mask])
            return original(self, *args, **kwargs)

        return mock.patch.object(builder, name, checked)

    with (
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", starting),
        watched("create_masked_load", "a read", 0, 1),
        watched("create_masked_store", "a write", 0, 2),
        watched("create_atomic_rmw", "an atomic", 1, 3),
        watched("create_atomic_cas", "an atomic", 0, None),
    ):
        yield launches
