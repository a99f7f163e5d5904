"""Checks of the fields of tile shapes, which may come from a file."""

from __future__ import annotations

from collections.abc import Collection

from fsbench.errors import InvalidArgument


def check_options(config: object, **options: Collection[int]) -> None:
    """Raise unless each field of a config is one of its options.

    Raises:
        InvalidArgument: one is not; the message names it.
    """
    for name, allowed in options.items():
        got = getattr(config, name)
        if got not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise InvalidArgument(f"{name}: expected {wanted}; got {got}")
