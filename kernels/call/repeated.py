"""Plain draws that are like an earlier one: past the checks, the choice and what stays the same.

Of a tensor, checks and launch look at dtype, shape, device, layout, and whether its address is a
multiple of 16 bytes. A call without options whose tensors are alike in all of that would pass the
same checks and launch the same kernel. Only addresses and the size of a float are new.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fsbench.kernels.call.request import TENSORS, Request
from fsbench.kernels.configs.gpu import runs_kernels

_MOST = 4096  # a server sees far fewer
_TOLD_BY_VALUE = (int, float, str, type(None))
_WARM = (2.0**-100, 2.0**100)  # temperatures between are neither greedy nor refused

_launches: dict[Hashable, Callable[..., Any]] = {}


def plain_kind(
    options: tuple[object, ...],
    plain: tuple[object, ...],
    values: tuple[object, ...],
    *arguments: Any,
) -> Hashable | None:
    """What decides how a call is checked and launched; None if the call may not be a plain one.

    options, plain: its options, and what they are in a plain call. values: of options that may have
        any. arguments: the others, which move from call to call.
    """
    if torch.compiler.is_compiling():
        return None
    for option, value in zip(options, plain, strict=True):
        if option is not value:
            return None
    kind: list[object] = []
    for value in values:
        if type(value) in _TOLD_BY_VALUE:
            kind += type(value), value  # 1 is not 1.0
        else:
            arguments += (value,)
    try:
        for x in arguments:
            if type(x) in TENSORS:
                kind += x.dtype, x.shape, x.device, x.is_contiguous(), x.data_ptr() % 16 == 0
            elif x is None:
                kind.append(None)
            elif type(x) is float and (x == 0 or _WARM[0] <= x <= _WARM[1]):
                kind.append(x == 0)
            else:
                return None
    except RuntimeError:  # one without memory of its own, as inside torch.vmap
        return None
    return tuple(kind)


def launch_of(kind: Hashable | None, hidden: Tensor) -> Callable[..., Any] | None:
    """How calls of this kind are launched; None if there has been none."""
    if kind is None:  # as under torch.compile, which so has no table to trace
        return None
    found = _launches.get(kind)
    if found is None or hidden.is_cuda or runs_kernels(hidden.device, hidden.dtype):
        return found
    return None


def remember(kind: Hashable, request: Request, family: Any, *how: Any) -> None:
    """Keep how a request of this kind, which has been carried out, is launched.

    family: the package of its call; family.launch.plain is given the request, and how.
    """
    if runs_kernels(request.hidden.device, request.hidden.dtype):
        if len(_launches) >= _MOST:
            _launches.clear()
        _launches[kind] = family.launch.plain(request, *how)
