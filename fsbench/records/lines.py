"""Append-only files of JSON lines, which hold samples and verdicts.

A line is on disk before `Lines.append` returns. Its last field, `running_crc32`, is the CRC-32 of
all bytes before the line and of the line without this field. So a line that is changed, removed,
repeated or added is noticed at the next one. A last line that a crash cut short is ignored by
readers and removed by the next writer. Older lines have no checksum, or one of the line
alone (`crc32`); they are read as before.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from fsbench.errors import ResultsError
from fsbench.records.disk import open_regular, refusals

LONGEST = 2**25
"""Bytes of a line, at most."""

PATIENCE = 2.0
"""Seconds to wait for the lock of a file: a killed process has ended by then."""

_CHECKSUMS = ("running_crc32", "crc32")
_LOCK_LOOK_S = 0.05


class LockedFile(ResultsError):
    """Another process writes to the file."""


@dataclass(frozen=True)
class Line:
    """One line of a file: its number from 1, its object, and the CRC-32 of the file up to it."""

    number: int
    value: dict[str, Any]
    crc32: int
    end: int


@dataclass
class Lines:
    """A file of JSON lines, opened for appending and locked until it is closed.

    count, crc32: its lines and the CRC-32 of its bytes; size: in bytes.
    """

    path: Path
    count: int
    crc32: int
    size: int
    _file: int | None

    @classmethod
    def open(cls, path: Path) -> Lines:
        """Open or create a file; remove a last line that was cut short.

        Raises:
            LockedFile: another process writes to it.
            ResultsError: it cannot be written, is not a regular file, or has other lines.
        """
        with refusals("write", path):
            opened = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            _lock(path, opened)
            with os.fdopen(os.dup(opened), "rb") as file:
                last = Line(0, {}, 0, 0)
                for last in _scanned(path, file):  # noqa: B007
                    pass
                file.seek(last.end)
                if file.read(1) not in (b"", b"{"):
                    raise ResultsError(f"{path}: expected lines of JSON objects; got another text")
            lines = cls(path, last.number, last.crc32, last.end, opened)
            with refusals("write", path):
                os.ftruncate(opened, last.end)
            lines.require_in_place()
        except BaseException:
            os.close(opened)
            raise
        return lines

    def append(self, line: Mapping[str, Any]) -> None:
        """Append an object; it is on disk when this returns, or else nothing of it is.

        Raises:
            ResultsError: it cannot be written, or the file was moved, removed or changed meanwhile.
        """
        assert self._file is not None, "the file is closed"
        self.require_in_place()
        text = json.dumps(line)
        checksum = zlib.crc32(text.encode(), self.crc32)
        data = f'{text[:-1]}, "{_CHECKSUMS[0]}": {checksum}}}\n'.encode()
        with refusals("write", self.path):
            try:
                remaining = data
                while remaining:
                    remaining = remaining[os.write(self._file, remaining) :]
                os.fsync(self._file)
            except BaseException:
                with suppress(OSError):
                    os.ftruncate(self._file, self.size)
                raise
        self.count += 1
        self.size += len(data)
        self.crc32 = zlib.crc32(data, self.crc32)

    def require_in_place(self) -> None:
        """Raise ResultsError if the file is no longer at its path, or was changed by others."""
        assert self._file is not None, "the file is closed"
        held = os.fstat(self._file)
        try:
            current = os.stat(self.path)
            is_moved = (current.st_dev, current.st_ino) != (held.st_dev, held.st_ino)
        except OSError:
            is_moved = True
        if is_moved:
            raise ResultsError(f"{self.path}: it was removed or renamed while it was written to")
        if held.st_size != self.size:
            raise ResultsError(
                f"{self.path}: something else changed it while it was written to; expected "
                f"{self.size} bytes, got {held.st_size}"
            )

    def close(self) -> None:
        """Close the file and release the lock."""
        if self._file is not None:
            os.close(self._file)
        self._file = None


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the lines of a file, which may be packed (*.gz); leave out a last line cut short.

    Raises:
        ResultsError: it cannot be read, is not a regular file, or a line is damaged.
    """
    with refusals("read", path), os.fdopen(open_regular(path), "rb") as file:
        if path.suffix != ".gz":
            yield from _scanned(path, file)
            return
        try:
            with gzip.open(file) as unpacked:
                yield from _scanned(path, unpacked)
        except (EOFError, zlib.error) as error:
            raise ResultsError(f"{path}: not a gzip file ({error})") from error


def _scanned(path: Path, file: BinaryIO | gzip.GzipFile) -> Iterator[Line]:
    crc32 = end = 0
    for number in count(1):
        text = file.readline(LONGEST)
        if not text.endswith(b"\n"):
            if len(text) == LONGEST:
                raise ResultsError(f"{path}:{number}: expected lines of at most {LONGEST} bytes")
            return
        try:
            value = _checked(text[:-1], crc32)
        except (ValueError, RecursionError, MemoryError) as error:
            raise ResultsError(f"{path}:{number}: not a results line ({error})") from error
        crc32, end = zlib.crc32(text, crc32), end + len(text)
        yield Line(number, value, crc32, end)


def _checked(text: bytes, before: int) -> dict[str, Any]:
    """Return the object of a line without its checksum. before: CRC-32 of all lines before it.

    Raises:
        ValueError, RecursionError: it is something else, or its checksum is wrong.
    """
    for name, start in zip(_CHECKSUMS, (before, 0), strict=True):
        body, separator, remaining = text.rpartition(f', "{name}": '.encode())
        if separator:
            text = body + b"}"
            if remaining != b"%d}" % zlib.crc32(text, start):
                more = ", or a line before it was changed, removed or repeated" if start else ""
                raise ValueError(f"its checksum is wrong: it was changed{more}")
            break
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"expected an object; got {type(value).__name__}")
    return value


def _lock(path: Path, file: int) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise LockedFile(f"{path}: another process is writing to it") from None
            time.sleep(_LOCK_LOOK_S)
        except OSError as error:
            raise ResultsError(f"cannot lock {path}: {error.strerror or error}") from error
