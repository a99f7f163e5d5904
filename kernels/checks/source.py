"""`Source`: a weight that something was made from, and whether it has changed since."""

from __future__ import annotations

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument


class Source:
    """What torch knows of a weight's values without looking at them: its address and its version.

    Torch counts what writes to a tensor in place. It does not count writes through `tensor.data`,
    by a kernel that is no operator of torch, by another process, or to a tensor that was made in
    inference mode; these are not seen here.
    """

    def __init__(self, weight: Tensor):
        self._then = _now(weight)

    def check(self, name: str, weight: Tensor) -> None:
        """Refuse a weight that is no longer what it was.

        Under torch.compile, which looks once at what may change later, nothing is looked at.

        Raises:
            InvalidArgument: it was written to, or is at another address.
        """
        if not torch.compiler.is_compiling() and _now(weight) != self._then:
            raise InvalidArgument(
                f"{name}: expected a weight that is as it was; got one that has changed since "
                f"{name} was made or refreshed: call {name}.refresh(weight)"
            )


def _now(weight: Tensor) -> tuple[int, int] | None:
    """(address, number of writes) of a weight; None for a fake one, which has no values."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
