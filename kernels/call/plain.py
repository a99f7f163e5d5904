"""What decides how a plain call is checked and launched: a call without options.

Of a tensor, checks and launch look at dtype, shape, device, layout, and whether its address is a
multiple of 16 bytes. A plain call whose tensors are alike in all of that passes the same checks and
launches the same kernels; only addresses and the size of a float are new.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_TENSORS = (Tensor, Parameter)  # not what derives from them: a fake one has no memory
_WARM = (2.0**-100, 2.0**100)  # temperatures between are neither greedy nor refused


def plain_kind(
    options: tuple[object, ...], plain: tuple[object, ...], *arguments: Any
) -> Hashable | None:
    """What decides how a call is checked and launched; None if the call may not be a plain one.

    options, plain: its options, and what they are in a plain call. arguments: the others.
    """
    if torch.compiler.is_compiling() or not all(map(is_, options, plain)):
        return None
    kind: list[object] = []
    try:
        for x in arguments:
            if type(x) in _TENSORS:
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
