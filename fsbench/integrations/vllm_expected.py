"""Check that a running vLLM has the functions, fields and attributes that the plug-in uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from importlib import import_module
from typing import Any

from fsbench.errors import EngineMismatch


@dataclass(frozen=True)
class ExpectedApi:
    """The parts of a vLLM version that are used. Keys are module:name or module:class.method.

    Attributes:
        signatures: function -> all its parameters.
        fields: dataclass or NamedTuple -> the fields that are used, by name.
        attributes: class -> attributes that its instances must have.
        filled: classes of `fields` that are constructed, so that every field without a default must
            be among those listed.
    """

    version: str
    signatures: Mapping[str, tuple[str, ...]]
    fields: Mapping[str, tuple[str, ...]]
    attributes: Mapping[str, tuple[str, ...]]
    filled: tuple[str, ...] = ()


def differences(
    expected: ExpectedApi,
    parameters: Callable[[str], Sequence[str] | None],
    fields: Callable[[str], Mapping[str, bool] | None],
) -> list[str]:
    """Return a line for each function or class that differs.

    Args:
        parameters: function -> its parameters, or None if it does not exist.
        fields: class -> {field: whether it has a default}, or None if it does not exist.
    """
    lines = []
    for path, names in expected.signatures.items():
        actual = parameters(path)
        if actual is None:
            lines.append(f"{path}: not found")
        elif tuple(actual) != names:
            lines.append(f"{path}: expected parameters {names}; got {tuple(actual)}")
    for path, names in expected.fields.items():
        defaults = fields(path)
        if defaults is None:
            lines.append(f"{path}: not found")
            continue
        absent = [name for name in names if name not in defaults]
        if absent:
            lines.append(f"{path}: expected fields {', '.join(absent)}")
        more = [name for name, default in defaults.items() if not default and name not in names]
        if more and path in expected.filled:
            lines.append(f"{path}: expected no further fields to fill; got {', '.join(more)}")
    return lines


def check_source(expected: ExpectedApi) -> None:
    """Raise EngineMismatch with every difference between the imported vLLM and what is used."""
    lines = differences(
        expected, lambda path: tuple(inspect.signature(find(path)).parameters), _fields
    )
    if lines:
        raise EngineMismatch(f"vLLM {expected.version}: {'; '.join(lines)}")


def _fields(path: str) -> dict[str, bool]:
    """Return {field: whether it has a default} of a dataclass or NamedTuple."""
    cls = find(path)
    if is_dataclass(cls):
        absent = (MISSING, MISSING)
        return {f.name: (f.default, f.default_factory) != absent for f in dataclass_fields(cls)}
    return {name: name in cls._field_defaults for name in cls._fields}


def check_parts(expected: ExpectedApi, parts: Mapping[str, object]) -> None:
    """Raise EngineMismatch unless these objects, by class, have the expected attributes."""
    for path, part in parts.items():
        absent = [name for name in expected.attributes[path] if not hasattr(part, name)]
        if absent:
            raise EngineMismatch(
                f"vLLM {expected.version}, {path}: expected attributes {', '.join(absent)}"
            )


def find(path: str) -> Any:
    """Import the object at module:attribute.attribute; raise EngineMismatch if it is missing."""
    module, _, names = path.partition(":")
    try:
        value: Any = import_module(module)
        for name in names.split("."):
            value = getattr(value, name)
    except (ImportError, AttributeError) as error:
        raise EngineMismatch(f"{path}: expected it in vLLM; {error}") from error
    return value
