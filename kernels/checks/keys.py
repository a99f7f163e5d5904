"""`Keyed`: an object that an operator names by a key, since it takes tensors and numbers only."""

from __future__ import annotations

from itertools import count
from typing import NoReturn, TypeVar
from weakref import WeakValueDictionary

from fsbench.errors import InvalidArgument, InvalidType

_numbers = count()
_alive: WeakValueDictionary[str, Keyed] = WeakValueDictionary()


class Keyed:
    """An object with a key that no other object of the process ever has.

    It is neither copied nor pickled: a copy would have the key, and share or lose the tensors that
    belong to it. `instead` says what to do instead.
    """

    instead = ""

    def register(self) -> None:
        """Give the object its key, from which `by_key` finds it while it is alive."""
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
    """Return the living object of a key.

    Raises:
        InvalidArgument: it no longer exists, or is of another kind.
    """
    found = _alive.get(key)
    if not isinstance(found, kind):
        raise InvalidArgument(
            f"{kind.__name__}: expected the one that the program was compiled with to be alive; "
            "got the key of none: keep a reference to it"
        )
    return found
