"""Removes the folder of the fork server's socket when the server ends.

Only the server imports this file, before anything else. The process that started the server removes
the folder too, unless it was killed.
"""

from __future__ import annotations

import atexit
import os
import shutil

from fsbench.measure.server import FOLDER

if folder := os.environ.pop(FOLDER, None):
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
