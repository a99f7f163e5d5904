"""Signals at any instant of a run: one line, an exit code, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from plug_in import plug_in
from tiny_run import TINY

from fsbench.measure import server


@pytest.fixture
def short_tmp():
    """A temporary folder for TMPDIR. The name of tmp_path is too long for a socket's address."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path, short_tmp):
    """Start `fsbench run` on a sampler that sleeps, with a new TMPDIR."""
    (tmp_path / "slow.py").write_text(plug_in("slow", launch="time.sleep(0.2)"))

    def run(*options):
        command = [sys.executable, "-m", "fsbench", "run", *TINY, "--provider-path", "slow.py"]
        return subprocess.Popen(
            [*command, "--provider", "slow", "--out", "x", *options],
            cwd=tmp_path,
            env={**os.environ, "TMPDIR": str(short_tmp)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_heed_hangups,
        )

    return run


def _heed_hangups():
    """Undo what nohup, under which these tests may run, has its processes ignore."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _wait_for_imports(process, name):
    """Wait until a process has mapped a file of this name: torch is being imported."""
    while process.poll() is None:
        with open(f"/proc/{process.pid}/maps") as maps:
            if name in maps.read():
                return
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("stopped", "library"),
    [
        (signal.SIGHUP, "_json"),
        pytest.param(signal.SIGINT, "libtorch", marks=pytest.mark.full),
    ],
)
def test_a_signal_during_imports_is_one_line(start, tmp_path, stopped, library):
    process = start()
    _wait_for_imports(process, library)
    process.send_signal(stopped)
    out, err = process.communicate()
    assert process.returncode == 128 + stopped and "Traceback" not in err, err
    if library == "_json":  # a busy machine may go on from torch's import before it is stopped
        assert out == "" and not (tmp_path / "x").exists()
        assert err.splitlines()[-1] == f"stopped by {stopped.name}"


@pytest.mark.full
def test_a_signal_while_cells_are_timed_says_how_to_go_on(start, tmp_path, short_tmp):
    process = start("--iters", "50")
    while not (tmp_path / "x" / "running.json").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped; to continue: fsbench run --resume x" in err and "Traceback" not in err
    assert list(short_tmp.iterdir()) == []


def test_folders_of_killed_runs_are_removed_by_the_next(short_tmp):
    dead = subprocess.Popen(["true"])
    dead.wait()
    owners = {"pymp-dead": str(dead.pid), "pymp-alive": f"{os.getpid()}", "pymp-odd": "x"}
    for name, owner in owners.items():
        (short_tmp / name).mkdir()
        (short_tmp / name / server.OWNER).write_text(owner)
    (short_tmp / "pymp-other").mkdir()  # of a program that is not fsbench
    code = "from fsbench.measure import server; server.start()"
    env = {**os.environ, "TMPDIR": str(short_tmp)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert {path.name for path in short_tmp.iterdir()} == {"pymp-alive", "pymp-odd", "pymp-other"}


@pytest.mark.full
def test_a_server_that_ends_leaves_the_folder_to_a_run_that_goes_on(short_tmp):
    """The run starts another server in it. A client that ends too early ends a server."""
    code = (
        "import os, socket\n"
        "from multiprocessing import forkserver\n"
        "from fsbench.measure import server\n"
        "context = server.start()\n"
        "client = socket.socket(socket.AF_UNIX)\n"
        "client.connect(forkserver._forkserver._forkserver_address)\n"
        "client.close()\n"
        "os.waitid(os.P_PID, forkserver._forkserver._forkserver_pid, os.WEXITED | os.WNOWAIT)\n"
        "process = context.Process(target=int)\n"
        "process.start()\n"
        "process.join()\n"
        "assert process.exitcode == 0\n"
    )
    env = {**os.environ, "TMPDIR": str(short_tmp)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(short_tmp.iterdir()) == []
