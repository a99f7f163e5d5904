"""The CPU cores of this machine."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of logical CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
