"""A variant: one kernel with all that its machine code depends on."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TUNED = 90
"""The compute capability that tile shapes were measured on; others get guesses."""
CAPABILITIES = (80, TUNED, 100)

Types = Mapping[str, str]
Constants = Mapping[str, Any]


@dataclass(frozen=True)
class Variant:
    """One kernel, compiled in one way for one compute capability.

    family: the kernel's name in tables and tests. name: the variant's among those of its family.
    kernel: the Triton or Gluon function.
    signature: type of each argument that is no constant. constants: value of each that is.
    options: of the compiler, such as num_warps.
    """

    family: str
    name: str
    kernel: Any
    signature: Types
    constants: Constants
    options: Mapping[str, int]
    capability: int

    @property
    def content(self) -> str:
        """What the machine code depends on, without names: equal for identical variants."""
        parts = (self.signature, self.constants, self.options)
        texts = [repr(sorted(part.items(), key=lambda item: item[0])) for part in parts]
        return "\n".join(
            [self.kernel.__module__, self.kernel.__name__, str(self.capability), *texts]
        )


def kernel(module: str, name: str) -> Any:
    """A kernel by the name of its module below `fsbench` and its own.

    A leading underscore more or less is the same name: it says who may launch a kernel, not what
    the kernel does, and trees differ in it.
    """
    found = importlib.import_module(f"fsbench.{module}")
    private = f"_{name}"
    return getattr(found, private) if hasattr(found, private) else getattr(found, name)


def variant(
    family: str,
    name: str,
    kernel: Any,
    types: Types,
    constants: Constants,
    capability: int = TUNED,
    **options: int,
) -> Variant:
    """A variant of a kernel whose arguments are looked up by name; a constant goes before a type.

    Args:
        types, constants: of any arguments; those that the kernel does not have are left out.

    Raises:
        KeyError: an argument of the kernel is in neither.
    """
    values = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature = {name: types[name] for name in kernel.arg_names if name not in values}
    return Variant(family, name, kernel, signature, values, options, capability)
