"""Attributes of a package that are imported at their first use.

Imports are written at the top of a file. Where a part of a package is slow to load, or needs an
optional package (Triton, an engine), its `__init__` says so in one line:

    __getattr__ = lazy_getattr(__name__, "launch")             package.launch is a module
    __getattr__ = lazy_getattr(__name__, tables=("table",))    package.tables.table

For mypy the same names are imported under TYPE_CHECKING. mypy must not see __getattr__, which would
make every other name Any: it is defined under else, or `if not TYPE_CHECKING`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def lazy_getattr(package: str, *modules: str, **names: Sequence[str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports at the first use.

    Args:
        modules: names of its modules.
        names: by module, the names that the package takes from it; a module below another is
            written a__b.
    """
    homes = {
        name: module.replace("__", ".") for module, members in names.items() for name in members
    }

    def __getattr__(name: str) -> Any:  # noqa: N807 (what Python calls it)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
