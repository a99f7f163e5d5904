"""`Keyed`: objects that an operator names by a key. `Source`: detects that a weight has changed.

An operator of torch takes tensors and numbers only, so it names any other object by its key.
"""

from __future__ import annotations

from itertools import count
from typing import NoReturn, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType

_numbers = count()
_alive: WeakValueDictionary[str, Keyed] = WeakValueDictionary()


class Keyed:
    """An object with a key that is unique in the process.

    It cannot be copied or pickled: a copy would have the same key, and share or lose the tensors
    that belong to it. `instead` is the advice in the error message.
    """

    instead = ""

    def register(self) -> None:
        """Give the object a key by which `by_key` returns it while it is alive."""
        self.key = str(next(_numbers))
        _alive[self.key] = self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse copy.copy, copy.deepcopy and pickle.

        Raises:
            InvalidType: always.
        """
        name = type(self).__name__
        raise InvalidType(f"{name}: expected not to be copied or pickled; {self.instead}")


AnyKeyed = TypeVar("AnyKeyed", bound=Keyed)


def by_key(key: str, kind: type[AnyKeyed]) -> AnyKeyed:
    """Return the object of a key.

    Raises:
        InvalidArgument: the object no longer exists, or is no `kind`.
    """
    keyed = _alive.get(key)
    if not isinstance(keyed, kind):
        raise InvalidArgument(
            f"{kind.__name__}: expected the object that the program was compiled with; got the "
            "key of an object that no longer exists: keep a reference to it"
        )
    return keyed


class Source:
    """The address and the version of a weight, which show most changes of its values.

    Torch counts the operations that write to a tensor in place. It does not count writes through
    `tensor.data`, by a kernel that is no operator of torch, by another process, or to a tensor that
    was made in inference mode. Such writes go unnoticed.
    """

    def __init__(self, weight: Tensor):
        self._state = _state_of(weight)

    def check(self, name: str, weight: Tensor) -> None:
        """Refuse a weight that has changed. Under torch.compile nothing is checked.

        Raises:
            InvalidArgument: the weight was written to, or is at another address.
        """
        if not torch.compiler.is_compiling() and _state_of(weight) != self._state:
            raise InvalidArgument(
                f"{name}: expected an unchanged weight; got one that has changed since {name} was "
                f"made or refreshed: call {name}.refresh(weight)"
            )


def _state_of(weight: Tensor) -> tuple[int, int] | None:
    """Return (address, number of writes); None for a fake tensor, which has no values."""
    if type(weight) not in (torch.Tensor, torch.nn.Parameter):
        return None
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
