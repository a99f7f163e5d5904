"""The fork server that starts the processes of a run, and how they end with the run.

The server imports torch once, while the command checks its arguments, so processes start fast.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from fsbench.errors import UnusableFile
from fsbench.machine import compilers

_SILENT = "ignore:resource_tracker:UserWarning"
"""Killed processes leave semaphores; Python's tracker removes them with this warning."""

_PR_SET_PDEATHSIG = 1


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
    context.set_forkserver_preload(["fsbench.measure.worker"])
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise UnusableFile(f"TMPDIR: {error.strerror or error}") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def end_with_server() -> None:
    """Make a process that the server forked end with the server, whatever either is doing.

    The kernel kills this process with the server. The server ends with the process that started
    it, if no child holds the server's descriptor. This process becomes the leader of a group, so
    that processes of compilers end with it, and Ctrl-C reaches the parent alone.
    """
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
