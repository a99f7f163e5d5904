"""What the compilers of this process took."""

from __future__ import annotations

import importlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

_triton_s = 0.0


def watch() -> None:
    """Count Triton's compilations from now on."""

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        global _triton_s
        _triton_s += times.total / 1e6

    importlib.import_module("triton").knobs.compilation.listener = listen


def seconds() -> dict[str, float]:
    """Seconds so far: triton since `watch`, also for Inductor; inductor and dynamo together;
    programs: CPU time of those started and ended, such as nvcc and ptxas."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "triton": _triton_s,
        "inductor": dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0,
        "programs": children.ru_utime + children.ru_stime,
    }


def process_age_s() -> float:
    """Seconds since this process was started; 0 where that is not told."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
