"""Parts of a package that are imported when they are first used, and not before.

Imports stand at the top of a file. Where a package has a part that is slow to load, or needs what
is not always there (Triton, an engine), its `__init__` says so in one line:

    __getattr__ = late(__name__, "launch")                  package.launch is a module
    __getattr__ = late(__name__, tables=("table",))         package.table is package.tables.table

For mypy the same names are imported under TYPE_CHECKING. It must not see __getattr__, by which it
would take every other name for Any: that stands under else, or `if not TYPE_CHECKING`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def late(package: str, *modules: str, **names: Sequence[str]) -> Callable[[str], Any]:
    """A package's `__getattr__`, which imports at the first use.

    modules: of the package. names: by module, what the package has from it; a module below another
    is written a__b.
    """
    homes = {name: home.replace("__", ".") for home, here in names.items() for name in here}

    def __getattr__(name: str) -> Any:  # noqa: N807 (what Python calls it)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name in homes:
            return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
