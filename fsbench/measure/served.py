"""Remove the folder of the fork server's socket when the server ends after the run.

Only the server imports this file, before anything else. A run that ends by itself removes the
folder; the server does so for a run that was killed. A server that ends before its run leaves the
folder, because the run starts another server in it.
"""

from __future__ import annotations

import atexit
import os
import shutil

from fsbench.measure.server import FOLDER


def _remove(folder: str, run: int) -> None:
    if os.getppid() != run:  # the parent has ended
        shutil.rmtree(folder, ignore_errors=True)


if name := os.environ.pop(FOLDER, None):
    atexit.register(_remove, name, os.getppid())
