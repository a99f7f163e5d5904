"""The time limit of tests, which ends one that waits for a GPU in vain."""

from __future__ import annotations

import subprocess
import sys

from tree import ROOT

TESTS = """
import signal
import time


def test_waits():
    # While a thread waits for the GPU in C, Python handles no signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)


def test_comes_after_it():
    pass
"""


def test_a_test_that_takes_no_signal_is_ended_and_others_run(tmp_path):
    (tmp_path / "test_waiting.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", tmp_path]
    options = ["-n", "1", "--timeout", "2", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *options, tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert "1 failed, 1 passed" in run.stdout, run.stdout + run.stderr
    assert "crashed while running 'test_waiting.py::test_waits'" in run.stdout
