"""Tests that wait in vain are ended: for a GPU by the time limit, for ranks when one has exited."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import on_ranks
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


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_test_that_blocks_signals_is_ended_and_the_others_run(tmp_path):
    (tmp_path / "test_hanging.py").write_text(TESTS)
    pytest_here = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml"]
    options = ["--rootdir", tmp_path, "-n", "1", "--timeout", "2", "-p", "no:cacheprovider"]
    ended = run(*pytest_here, *options, tmp_path)
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "crashed while running 'test_hanging.py::test_waits'" in ended.stdout


def _exit_one(rank: int) -> None:
    if rank == 1:
        os._exit(7)


def test_a_rank_that_exits_without_a_result_is_named():
    with pytest.raises(AssertionError, match="rank 1 exited with code 7"):
        on_ranks(2, _exit_one)


def test_ranks_find_the_tests_of_a_plain_pytest():
    """`python -m pytest` puts the working directory on the path, `pytest` does not."""
    name = f"{__file__}::{test_a_rank_that_exits_without_a_result_is_named.__name__}"
    ended = run(Path(sys.executable).with_name("pytest"), "-p", "no:cacheprovider", name)
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr
