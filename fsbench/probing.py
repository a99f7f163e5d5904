"""Plug-ins tried in a process of their own: one that exits, crashes or hangs takes nobody along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache

PATIENCE_S = 60.0
"""How long a plug-in may take to be imported and to answer."""

_PROBE = """
import json, sys
report, paths, *plug_in = sys.argv[1:]
sys.path[:] = json.loads(paths)
from fsbench.discover import probe
probe(int(report), *plug_in)
"""


def reason_against(*plug_in: str) -> str:
    """Why a plug-in cannot be used, "" if it can. plug_in: arguments of fsbench.discover.load."""
    return _reason(plug_in, json.dumps(sys.path))


@cache
def _reason(plug_in: tuple[str, ...], paths: str) -> str:
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROBE, str(theirs), paths, *plug_in],
        pass_fds=[theirs],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs)
    os.set_blocking(ours, False)  # what it started may keep the other end open
    said = b""
    try:
        code = process.wait(PATIENCE_S)
        with suppress(BlockingIOError):
            said = os.read(ours, 10_000)
    except subprocess.TimeoutExpired:
        return f"it hangs: not imported within {PATIENCE_S:g} s"
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code == 0 and said:
        return str(json.loads(said))
    return f"it ends the process, by {f'signal {-code}' if code < 0 else f'exit code {code}'}"
