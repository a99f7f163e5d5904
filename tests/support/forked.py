"""Run scripts in fresh processes that share one start of Python and its imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_FORK_FOR_EACH = """
import gc, json, os, sys, traceback
preload, scripts, folder = json.load(sys.stdin)
exec(preload)
gc.freeze()
codes = []
for number, (name, code) in enumerate(scripts):
    if (pid := os.fork()) == 0:
        for descriptor, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{number}.{ending}", os.O_WRONLY | os.O_CREAT), descriptor)
        status = 0
        try:
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code or 0
        except BaseException:
            status = traceback.print_exc() or 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # taking down torch would cost a second
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
print(json.dumps(codes))
"""


class Output(NamedTuple):
    """The output of a script and its exit code."""

    code: int
    out: str
    err: str


def run_forked(
    scripts: Iterable[tuple[str, str]], preload: str = "", env: dict[str, str | None] | None = None
) -> list[Output]:
    """Run each script in a fork of a new process.

    Args:
        scripts: (name for tracebacks, source code).
        preload: code that runs once, before the forks: imports that the scripts share.
        env: changes of the environment; None removes a variable.
    """
    changed = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _FORK_FOR_EACH],
            input=json.dumps([preload, list(scripts), folder]),
            capture_output=True,
            text=True,
            env={name: value for name, value in changed.items() if value is not None},
        )
        assert done.returncode == 0, done.stderr
        return [
            Output(code, *(Path(folder, f"{n}.{end}").read_text("utf-8") for end in ("out", "err")))
            for n, code in enumerate(json.loads(done.stdout))
        ]


def failures(scripts: Iterable[tuple[str, str]], outputs: Iterable[Output]) -> list[str]:
    """Return a text for each script whose exit code is not 0."""
    return [
        f"{name}: exit {done.code}\n{done.out}{done.err}"
        for (name, _), done in zip(scripts, outputs, strict=True)
        if done.code
    ]
