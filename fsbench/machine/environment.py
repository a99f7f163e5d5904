"""The record in env.json: machine, versions and commit of a run."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fsbench
from fsbench.cores import usable_cores
from fsbench.errors import InvalidArgument, shown
from fsbench.machine import hardware
from fsbench.machine.packages import package_version

_PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "flashinfer-python",
    "cupti": "cupti-python",
    "numpy": "numpy",
    "transformers": "transformers",
    "vllm": "vllm",
    "xllamacpp": "xllamacpp",
}

_SOURCE = Path(__file__).resolve().parents[2]
_SOURCE_PATHS = ("fsbench", "kernels", "baselines", "pyproject.toml")


def environment(device: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the environment record of a run on `device` ("cuda", "cuda:1" or "cpu").

    `Store.resume` compares `gpu` ("" on a CPU), `device` (its type) and `cpu`. Versions of absent
    packages are None, as are git_sha and git_dirty outside a source tree. The variable
    FSBENCH_COMMIT, for a tree that was copied to another machine, replaces git_sha; git_dirty is
    then None.
    """
    kind = torch.device(device).type
    git_sha, git_dirty = _named_commit(), None
    if git_sha is None:
        git_sha, git_dirty = git_state(_SOURCE)
    gpus = hardware.gpus()
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "fsbench": fsbench.__version__,
        "git_sha": git_sha,
        "git_dirty": git_dirty,
        "argv": [*(Path(program).name for program in argv[:1]), *argv[1:]],
        "device": kind,
        "gpu": torch.cuda.get_device_name(device) if kind == "cuda" else "",
        "cpu": hardware.cpu_name(),
        "cores": usable_cores(),
        "driver": gpus[0].driver if gpus else None,
        "cuda": torch.version.cuda,
        **{name: package_version(package) for name, package in _PACKAGES.items()},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _named_commit() -> str | None:
    """Return FSBENCH_COMMIT, which becomes part of a folder's name; None if it is not set."""
    commit = os.environ.get("FSBENCH_COMMIT") or None
    if commit and not re.fullmatch(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}", commit):
        raise InvalidArgument(
            "FSBENCH_COMMIT: expected a commit id, or up to 64 letters, digits, '.', '_' and '-'; "
            f"got {shown(commit)}"
        )
    return commit


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Return (commit, whether the sources differ from it) of a source tree, else (None, None).

    Only the code counts as a difference: results written into the tree do not. A wheel installed
    somewhere below a foreign repository is not a source tree of ours.
    """
    try:
        top = _git(folder, "rev-parse", "--show-toplevel")
        if Path(top).resolve() != folder.resolve():
            return None, None
        sha = _git(folder, "rev-parse", "HEAD")
        return sha, bool(_git(folder, "status", "--porcelain", "--", *_SOURCE_PATHS))
    except (OSError, subprocess.SubprocessError):
        return None, None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()
