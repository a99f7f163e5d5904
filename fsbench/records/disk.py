"""Files on disk: written whole or not at all, read only if they are regular and not too large."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from fsbench.errors import ResultsError

LARGEST = 2**28
"""Bytes of a file that is read as a whole, at most."""


@contextmanager
def refusals(action: str, path: Path) -> Iterator[None]:
    """Turn the system's refusal of what is done inside into one line that names the path."""
    try:
        yield
    except OSError as error:
        raise ResultsError(f"cannot {action} {path}: {error.strerror or error}") from error


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file; a FIFO is not waited for.

    Raises:
        OSError: it cannot be opened, or is a folder, a device or a pipe.
    """
    opened = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        mode = os.fstat(opened).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        os.set_blocking(opened, True)
    except BaseException:
        os.close(opened)
        raise
    return opened


def read_file(path: Path) -> bytes:
    """All bytes of a regular file of at most LARGEST.

    Raises:
        OSError: it cannot be read, is not a regular file, or is larger.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise OSError(errno.EFBIG, f"it has more than {LARGEST} bytes")
    return data


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    Raises:
        OSError: it cannot be written, or is something else than a regular file.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process of this number that was killed; not followed
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(os.fsencode(content) if isinstance(content, str) else content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def write_into(folder: Path, files: Mapping[str, str]) -> None:
    """Write texts into a folder, by name, each whole or not at all; it is made if need be."""
    with refusals("write results in", folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(folder / name, text)
