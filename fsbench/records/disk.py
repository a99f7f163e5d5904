"""Writing files: a crash or a full disk never leaves a part of one, and is told in one line."""

from __future__ import annotations

import json
import os
import zlib
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


def write_into(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts into a folder, by name, each whole or not at all; it is made if need be."""
    with refusals("write results in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(folder / name, text)


def append_line(file: TextIO, line: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file; it is on disk when this returns."""
    append_text(file, json.dumps(line))


def append_text(file: TextIO, text: str) -> None:
    """Append a line to a file; it is on disk when this returns."""
    file.write(text + "\n")
    file.flush()
    os.fsync(file.fileno())


_CHECKSUM = ', "crc32": '


def with_checksum(line: Mapping[str, Any]) -> str:
    """A line of JSON with a last field `crc32`: of the text without that field."""
    text = json.dumps(line)
    return f"{text[:-1]}{_CHECKSUM}{zlib.crc32(text.encode())}}}"


def checked_line(text: bytes) -> dict[str, Any]:
    """The object on a line of JSON, which has no checksum or the right one; without it.

    Raises:
        ValueError, RecursionError: it is something else.
    """
    body, found, rest = text.rpartition(_CHECKSUM.encode())
    if found:
        text = body + b"}"
        if rest != b"%d}" % zlib.crc32(text):
            raise ValueError("its checksum is wrong")
    line = json.loads(text)
    if not isinstance(line, dict):
        raise ValueError(f"expected an object; got {type(line).__name__}")
    return line
