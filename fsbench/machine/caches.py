"""The folders in which compilers of kernels keep what they have compiled for later processes."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path


def filled() -> list[str]:
    """Return which caches are not empty: triton, inductor (torch.compile), flashinfer.

    A cached kernel is loaded, not compiled; a cache that is not empty may lack a kernel.
    """
    return [name for name, folder in folders().items() if _holds_anything(folder)]


def folders() -> dict[str, Path]:
    """Return the folder of each cache (triton, inductor, flashinfer): its variable or default."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name, as torch has it, too
        user = f"uid_{os.getuid()}"
    default = {
        "triton": Path(os.environ.get("TRITON_HOME", Path.home())) / ".triton" / "cache",
        "inductor": Path(tempfile.gettempdir()) / f"torchinductor_{user}",
        "flashinfer": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
        / ".cache"
        / "flashinfer",
    }
    chosen = {"triton": "TRITON_CACHE_DIR", "inductor": "TORCHINDUCTOR_CACHE_DIR"}
    return {
        name: Path(os.environ.get(chosen.get(name, ""), folder)) for name, folder in default.items()
    }


def _holds_anything(folder: Path) -> bool:
    try:
        return any(folder.iterdir())
    except OSError:  # it does not exist
        return False
