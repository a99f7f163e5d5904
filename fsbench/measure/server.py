"""The fork server that starts the processes of a run, and how they end with the run.

The server imports torch once, while the command checks its arguments, so processes start fast.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.util import get_temp_dir
from pathlib import Path

from fsbench.errors import UnusableFile
from fsbench.machine import compilers

FOLDER = "FSBENCH_SERVER_FOLDER"
"""Variable with the folder of the server's socket (fsbench.measure.served)."""

OWNER = "fsbench-owner"
"""File in a temporary folder with the id of the process that it belongs to."""

_SILENT = "ignore:resource_tracker:UserWarning"
"""Killed processes leave semaphores; Python's tracker removes them with this warning."""

_PR_SET_PDEATHSIG = 1
_LONGEST_SOCKET = 80  # bytes of the folder: a socket's path has at most 107


def start() -> ForkServerContext:
    """Start the server if it does not run yet; return at once a context for its processes.

    Variables for compilers are set. Ctrl-C does not reach the server.

    Raises:
        UnusableFile: TMPDIR cannot be written to, or its name is too long for a socket.
    """
    compilers.settle()
    if _SILENT not in sys.warnoptions:  # children inherit them
        sys.warnoptions.append(_SILENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fsbench.measure.served", "fsbench.measure.worker"])
    try:
        folder = get_temp_dir()
        _remove_folders_of_dead_owners(Path(folder))
    except OSError as error:
        raise UnusableFile(f"TMPDIR: {error.strerror or error}") from error
    if len(os.fsencode(folder)) > _LONGEST_SOCKET:
        most = _LONGEST_SOCKET - len(os.path.basename(folder)) - 1
        raise UnusableFile(
            f"TMPDIR: expected a folder whose name has at most {most} bytes; got "
            f"{os.path.dirname(folder)!r}"
        )
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.environ[FOLDER] = folder
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[FOLDER]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _remove_folders_of_dead_owners(folder: Path) -> None:
    """Mark a temporary folder as this process's; remove those whose process was killed."""
    if multiprocessing.parent_process() is None:  # else it is the parent's folder
        (folder / OWNER).write_text(f"{os.getpid()}")
    for mark in folder.parent.glob(f"pymp-*/{OWNER}"):
        with suppress(OSError, ValueError):  # removed meanwhile, or another user's
            if not Path(f"/proc/{int(mark.read_text())}").exists():
                shutil.rmtree(mark.parent, ignore_errors=True)


def end_with_server() -> None:
    """Make a process that the server forked end with the server, whatever either is doing.

    The kernel kills this process with the server. The server ends with the process that started
    it, if no child holds the server's descriptor. This process becomes the leader of a group, so
    that processes of compilers end with it, and Ctrl-C reaches the parent alone.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
