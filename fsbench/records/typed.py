"""Values read from files, held to the annotations of dataclasses."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def typed(kind: type[T], values: Any) -> T:
    """The dataclass `kind` of these values by field.

    Raises:
        ValueError, TypeError: a field is unknown, missing or of another type than annotated.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"expected an object; got {values!r:.40}")
    hints: dict[str, Any] = _hints(kind)  # type: ignore[arg-type]
    for name, value in values.items():
        if name in hints and not fits(value, hints[name]):
            raise TypeError(f"{name}: expected {_word(hints[name])}; got {value!r:.40}")
    return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}  # type: ignore[arg-type]


def fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of a type: numbers are finite, integers have 64 bits."""
    if hint is Any:
        return True
    if get_origin(hint) is list:
        return isinstance(value, list) and all(fits(each, get_args(hint)[0]) for each in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(fits(v, get_args(hint)[1]) for v in value.values())
    if get_origin(hint) is types.UnionType:
        return any(fits(value, each) for each in get_args(hint))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value) and abs(value) < 2.0**63
    if hint is int:
        return type(value) is int and abs(value) <= 2**63
    return type(value) is hint and (hint is not str or _writable(value))


def _writable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _word(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else f"{hint}"
