"""What the server of a run does when it ends: it removes the folder of its socket.

The server imports this first, and nothing else does. The process that started the server removes
the folder too, but not if it was killed.
"""

from __future__ import annotations

import atexit
import os
import shutil

from fsbench.measure.server import FOLDER

if folder := os.environ.pop(FOLDER, None):
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
