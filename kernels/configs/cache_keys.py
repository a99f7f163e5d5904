"""Make Triton's keys of compiled kernels equal in all processes, so that these share a cache."""

from __future__ import annotations

from functools import wraps
from typing import Any

try:
    from triton.runtime.jit import DependenciesFinder
except ModuleNotFoundError:  # it exists for Linux only
    DependenciesFinder = None


def settle() -> None:
    """Make the keys of kernels independent of what the process compiled before them.

    A key has the globals of all functions that a kernel calls. Triton 3.6 collects the globals of a
    function before it hashes the function, but finds them by hashing. So they are missing, unless
    another kernel has called the function before. Here it is hashed first, as in later versions.
    """
    update = getattr(DependenciesFinder, "_update_hash", None)
    if update is None or hasattr(update, "__wrapped__"):
        return

    @wraps(update)
    def hashed_first(self: Any, func: Any) -> None:
        if func.cache_key:
            update(self, func)

    DependenciesFinder._update_hash = hashed_first
