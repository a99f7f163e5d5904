"""Every error fsbench raises on purpose. They are caught once, in `fsbench.cli`.

A caller's mistake is also a `ValueError` or `TypeError`, so library users need not know this
module. Messages name the argument, what was expected and what was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FsbenchError(Exception):
    """Base of all; `exit_code` is what the command line returns for it."""

    exit_code = 1


class InvalidArgument(FsbenchError, ValueError):
    """A value out of range, of the wrong shape, device or layout, or a name nobody knows."""

    exit_code = 2


class InvalidOption(FsbenchError):
    """A value of a command's option that its reader refuses (fsbench.cli.options)."""

    exit_code = 2


class InvalidType(FsbenchError, TypeError):
    """An argument of the wrong type or dtype."""

    exit_code = 2


class UnsupportedProblem(FsbenchError):
    """This sampler cannot do this problem: the cell gets status `unsupported`."""

    exit_code = 2


class ProviderUnavailable(FsbenchError):
    """The sampler exists but cannot run here (a missing package, no GPU)."""

    exit_code = 4


class CaptureError(FsbenchError, RuntimeError):
    """A launch cannot be captured in a CUDA graph yet; the message says what must come first."""


class VerificationFailed(FsbenchError):
    """The sampler does not draw what it should; it is not timed."""


class TimerUnavailable(FsbenchError):
    """The timer that was asked for cannot run here. Nothing falls back to another."""

    exit_code = 4


class DeviceUnavailable(FsbenchError):
    """No usable device of the kind asked for."""

    exit_code = 4


class EngineUnavailable(FsbenchError):
    """A serving engine cannot run here: its package is missing, or not the version it has to be."""

    exit_code = 4


class EngineMismatch(EngineUnavailable):
    """An engine's source is not what an integration was written for: it says what differs."""


class EngineFailed(FsbenchError):
    """An engine was started, and died or answered with an error; the message has its last words."""

    exit_code = 3


class UnusableFile(FsbenchError, OSError):
    """A file of the caller's that cannot be read or written; the message says which and why."""

    exit_code = 2


class ResultsError(FsbenchError):
    """A results folder that cannot be read, written or resumed."""

    exit_code = 2


def shown(given: str) -> str:
    """What a caller gave, quoted and cut at 80 characters."""
    return repr(given) if len(given) <= 80 else f"{given[:77]!r}..."


def printable(path: str) -> str:
    """Return a path's text with bytes that are not UTF-8 (surrogateescape) replaced by U+FFFD."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def as_text(value: object) -> str:
    """str(value), whatever it is: what is not Unicode is escaped, and a failure of str is named."""
    try:
        text = str(value)
    except BaseException as error:
        text = f"(no text: str() raised {type(error).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(said: object) -> str:
    """What an error or a text says, in one printable line of at most 300 characters."""
    line = " ".join(as_text(said).split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def describe(error: BaseException) -> str:
    """The same with the error's class in front: for errors that are not fsbench's own."""
    return ": ".join(filter(None, (one_line(type(error).__name__), one_line(error))))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a GPU had no memory left. torch's CPU allocator has no class for it."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in as_text(error)
    )


def unknown_name(what: str, given: str, known: Iterable[str]) -> InvalidArgument:
    """An error for a name that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = [name for name in known if given and name.startswith(given)]
    near = near or difflib.get_close_matches(given, known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidArgument(f"{what}: expected one of {', '.join(known)}; got {shown(given)}{hint}")
