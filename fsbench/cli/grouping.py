"""Commands whose options come in groups: a dataclass for each group."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer: each parameter that is a dataclass becomes its fields, as options.

    A field is annotated as an option of Typer is, and has a default.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters: list[Parameter] = []
    for name in inspect.signature(command).parameters:
        group = groups.get(name)
        options = get_type_hints(group, include_extras=True) if group else {name: hints[name]}
        defaults = {each.name: each.default for each in fields(group)} if group else {}
        for option, hint in options.items():
            default = defaults.get(option, MISSING)
            parameters.append(
                Parameter(
                    option,
                    Parameter.KEYWORD_ONLY,
                    default=Parameter.empty if default is MISSING else default,
                    annotation=hint,
                )
            )

    def call(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{each.name: given.pop(each.name) for each in fields(group)})
        command(**given)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    return call
