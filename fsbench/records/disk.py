"""Writing files: a crash or a full disk never leaves a part of one, and is told in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from fsbench.errors import ResultsError


@contextmanager
def refusals(action: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal of what is done inside into one line that names the path."""
    try:
        yield
    except OSError as error:
        raise ResultsError(f"cannot {action} {path}: {error.strerror or error}") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def append_line(file: TextIO, line: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file; it is on disk when this returns."""
    file.write(json.dumps(line) + "\n")
    file.flush()
    os.fsync(file.fileno())
