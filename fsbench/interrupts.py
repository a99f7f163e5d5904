"""Signals that stop a command: Ctrl-C, SIGTERM and SIGHUP.

While commands are imported and arguments are checked, a signal ends the process with one line.
Once a command works, a signal raises, so that files are closed and worker processes are ended.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def exit_at_once() -> None:
    """Let each of SIGNALS end this process with one line and exit code 128 + its number.

    A signal that this process was started to ignore (nohup, a shell's background) stays ignored.
    """
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler, _raise):
            signal.signal(number, _exit)


def raise_exceptions() -> None:
    """Let each of SIGNALS raise KeyboardInterrupt or SystemExit, if `exit_at_once` was called."""
    for number in SIGNALS:
        if signal.getsignal(number) is _exit:
            handler = signal.default_int_handler if number == signal.SIGINT else _raise
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, f"stopped by {signal.Signals(number).name}\n".encode())
    finally:
        os._exit(128 + number)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)
