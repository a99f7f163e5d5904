"""The C functions by which Triton launches kernels, built ahead like the kernels themselves."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import Any

from triton.backends.nvidia import driver

_REFUSALS = (AssertionError, ImportError, OSError, RuntimeError, subprocess.CalledProcessError)


def build_launcher(kernel: Any) -> None:
    """Build the function that launches a compiled kernel into Triton's cache, if Triton needs one.

    Triton 3.6 builds a C function for each signature at the first launch, one after the other: 43
    for the 156 kernels of an engine. Triton 3.9 launches all kernels by one function. Nothing is
    built without the driver's library (libcuda) or a C compiler; the first launch reports that.
    """
    if hasattr(driver, "make_launcher") and kernel.metadata.target.backend == "cuda":
        with suppress(*_REFUSALS):
            driver.CudaLauncher(kernel.src, kernel.metadata)
