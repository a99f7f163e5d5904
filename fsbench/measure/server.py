"""The server from which the processes of a run are started.

It has what takes seconds to import, so that all of them start at once. It imports that while the
command line itself does.
"""

from __future__ import annotations

import multiprocessing
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

from fsbench.machine import compilers

_SILENT = "ignore:resource_tracker:UserWarning"
"""Processes that are ended leave semaphores; Python's tracker removes them, and says so."""


def start() -> ForkServerContext:
    """Start it, if it does not run yet, and return at once: what starts processes from it.

    Their compilers are settled.
    """
    compilers.settle()
    if _SILENT not in sys.warnoptions:  # which are those of children, too
        sys.warnoptions.append(_SILENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fsbench.measure.worker"])
    forkserver.ensure_running()
    return context
