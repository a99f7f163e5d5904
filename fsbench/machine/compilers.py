"""Settings of compilers, and the seconds that compilers of this process took."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsbench.machine import caches

_triton_s = 0.0


def settle() -> None:
    """Set variables of compilers for this process and its children, so that results are equal.

    Triton uses torch's ptxas, if there is one. Inductor sets that at its first compilation: without
    this, the assembler of other kernels would depend on what ran before, and caches would miss.
    Inductor also moves Triton's cache into its own folder at its first kernel, unless the variable
    is set: a process that has compiled with torch would not find the kernels of one that has not.
    nvcc uses all cores for a file, if it can: the instructions stay the same (all 301 kernels of
    FlashInfer 0.6.9's sampling, CUDA 13.0). Variables that the user has set are kept.
    """
    torch = find_spec("torch")
    assembler = Path(torch.origin).parent / "bin" / "ptxas" if torch and torch.origin else None
    if assembler and os.access(assembler, os.X_OK):
        os.environ.setdefault("TRITON_PTXAS_PATH", str(assembler))
    os.environ.setdefault("TRITON_CACHE_DIR", str(caches.folders()["triton"]))
    flags = os.environ.get("NVCC_APPEND_FLAGS", "")
    if "split-compile" not in flags and "--split-compile" in _nvcc_help():
        os.environ["NVCC_APPEND_FLAGS"] = f"{flags} --split-compile=0".strip()


def _nvcc_help() -> str:
    """Return the help text of the nvcc that FlashInfer would use, "" without nvcc."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    try:
        return subprocess.run([nvcc, "--help"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def watch() -> None:
    """Count Triton's compilations from now on."""

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        global _triton_s
        _triton_s += times.total / 1e6

    importlib.import_module("triton").knobs.compilation.listener = listen


def seconds() -> dict[str, float]:
    """Return seconds so far by compiler.

    triton: since `watch`, for Inductor too. inductor: with dynamo. programs: CPU time of ended
    child processes, such as nvcc and ptxas.
    """
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "triton": _triton_s,
        "inductor": dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0,
        "programs": children.ru_utime + children.ru_stime,
    }


def process_age_s() -> float:
    """Return the seconds since this process was started; 0 if unknown."""
    try:
        began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - began / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return 0.0
