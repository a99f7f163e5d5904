"""Let GPU tests compile each kernel in one of their processes, while the others wait for it.

Several workers need the same kernel at about the same time, and Triton's cache has it only once it
is compiled. A lock for each kernel lets the second process find it there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.runtime.jit import JITFunction


def compile_once() -> None:
    """Replace the function of Triton that compiles a kernel, or loads it from the cache."""
    folder = Path(tempfile.gettempdir()) / f"fsbench-compile-once-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    original = JITFunction._do_compile

    def compile_locked(self: Any, key: str, *arguments: Any, **named: Any) -> Any:
        name = f"{triton.__version__} {self.__module__}.{self.__name__} {key}"
        lock = folder / hashlib.sha256(name.encode()).hexdigest()
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it
            return original(self, key, *arguments, **named)

    JITFunction._do_compile = compile_locked
