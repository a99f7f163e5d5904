"""Exit codes of commands, and every error that fsbench raises on purpose (caught in `fsbench.cli`).

A caller's mistake is also a `ValueError` or `TypeError`, so users of the library need not import
this module. Messages name the argument, what was expected and what was given.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of all commands. A signal ends a command with 128 + its number."""

    OK = 0
    CHECK_FAILED = 1
    """A sampler does not draw what it should, or a comparison with --fail-on found a difference."""
    USAGE = 2
    """An argument, a variable or a file is not what was expected."""
    INCOMPLETE = 3
    """Some cells, engines or tile shapes failed or were not measured."""
    UNAVAILABLE = 4
    """This machine lacks the device, timer, package or engine that was asked for."""
    DEFECT = 5
    """`fsbench verify` found a sampler that does not do what it claims."""


class FsbenchError(Exception):
    """Base of all; `exit_code` is what the command line returns for it."""

    exit_code = ExitCode.CHECK_FAILED


class InvalidArgument(FsbenchError, ValueError):
    """A value out of range, of the wrong shape, device or layout, or an unknown name."""

    exit_code = ExitCode.USAGE


class InvalidOption(FsbenchError):
    """A value of a command's option that its reader refuses (fsbench.cli.options)."""

    exit_code = ExitCode.USAGE


class InvalidType(FsbenchError, TypeError):
    """An argument of the wrong type or dtype."""

    exit_code = ExitCode.USAGE


class UnsupportedProblem(FsbenchError):
    """A sampler does not support a problem: the cell gets status `unsupported`."""

    exit_code = ExitCode.USAGE


class ProviderUnavailable(FsbenchError):
    """A sampler cannot run on this machine: a package or a GPU is missing."""

    exit_code = ExitCode.UNAVAILABLE


class CaptureError(FsbenchError, RuntimeError):
    """A launch cannot be captured in a CUDA graph yet; the message says what must come first."""


class VerificationFailed(FsbenchError):
    """A sampler does not draw what it should; it is not timed."""


class TimerUnavailable(FsbenchError):
    """The timer that was asked for cannot run on this machine. There is no fallback."""

    exit_code = ExitCode.UNAVAILABLE


class DeviceUnavailable(FsbenchError):
    """There is no usable device of the kind that was asked for."""

    exit_code = ExitCode.UNAVAILABLE


class EngineUnavailable(FsbenchError):
    """A serving engine cannot run: its package is missing or has an unsupported version."""

    exit_code = ExitCode.UNAVAILABLE


class EngineMismatch(EngineUnavailable):
    """An engine's source is not what an integration was written for; the message has the diff."""


class EngineFailed(FsbenchError):
    """An engine died or answered with an error; the message has its last output."""

    exit_code = ExitCode.INCOMPLETE


class UnusableFile(FsbenchError, OSError):
    """A file of the caller that cannot be read or written; the message says which and why."""

    exit_code = ExitCode.USAGE


class ResultsError(FsbenchError):
    """A results folder that cannot be read, written or resumed."""

    exit_code = ExitCode.USAGE


def shown(text: str) -> str:
    """Quote text for a message, cut at 80 characters."""
    return repr(text) if len(text) <= 80 else f"{text[:77]!r}..."


def printable(path: str) -> str:
    """Return a path's text with bytes that are not UTF-8 (surrogateescape) replaced by U+FFFD."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def as_text(value: object) -> str:
    """Return str(value), whatever it is: surrogates are escaped, and a failure of str is named."""
    try:
        text = str(value)
    except BaseException as error:
        text = f"(no text: str() raised {type(error).__name__})"
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(value: object) -> str:
    """Return the text of an error or value as one printable line of at most 300 characters."""
    line = " ".join(as_text(value).split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def describe(error: BaseException) -> str:
    """Return `one_line` with the error's class in front: for errors that are not fsbench's."""
    return ": ".join(filter(None, (one_line(type(error).__name__), one_line(error))))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the host or a GPU ran out of memory (torch's CPU allocator has no class)."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in as_text(error)
    )


def unknown_name(
    argument: str, name: str, names: Iterable[str], list_command: str = ""
) -> InvalidArgument:
    """Return an error for a name that does not exist, with the nearest that does.

    Args:
        names: those that exist.
        list_command: a command that prints them, for a list too long for a message.
    """
    names = sorted(names)
    near = [candidate for candidate in names if name and candidate.startswith(name)]
    near = near or difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    expected = (
        f"a name that `{list_command}` prints" if list_command else f"one of {', '.join(names)}"
    )
    return InvalidArgument(f"{argument}: expected {expected}; got {shown(name)}{hint}")
