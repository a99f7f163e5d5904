"""`fsbench run --warmers`: processes that compile ahead, and what becomes of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
from tiny_run import TINY

from fsbench.records.store import read_records


@pytest.fixture
def helped(fsbench, plugin, tmp_path):
    """A run with processes that compile ahead: (its output, who built for which V)."""

    def run(*more, build="pass", code=0):
        log = tmp_path / "built"
        reported = (
            f"open({str(log)!r}, 'a').write(f'{{os.getpid()}} {{problem.V}} {{problem.B}}\\n')"
        )
        plugin_options = plugin(build=f"{reported}; {build}")
        options = [each for each in TINY if each != "--no-check"]
        exit_code, out, err = fsbench("run", *options, *plugin_options, "--out", "x", *more)
        assert exit_code == code, out + err
        built = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
        return out + err, built

    return run


def built_by(built, measuring):
    return [(V, B) for pid, V, B in built if pid == measuring]


def test_another_process_verifies_and_calls_first(helped, tmp_path):
    _, built = helped("--warmers", "2", build="time.sleep(0.2)")
    measuring = built[-1][0]
    assert built_by(built, measuring) == [(50, 1), (50, 3)]  # not the gate
    assert {(50, 1), (50, 3)} <= {(V, B) for pid, V, B in built if pid != measuring}
    spent = json.loads((tmp_path / "x" / "env.json").read_text())["times"][0]["ahead"]
    assert spent["gate"] > 0 and spent["first"] > 0
    for record in read_records(tmp_path / "x"):
        first = record.rounds[0]
        assert first.ahead_s >= 0.2 and first.warm[-1] == "ahead"


def test_without_others_the_process_does_all_itself(helped):
    _, built = helped("--warmers", "0")
    assert len({pid for pid, _, _ in built}) == 1


@pytest.mark.parametrize("ends", ["os._exit(1)", "os.kill(os.getpid(), 9)", "1 / 0"])
def test_others_that_die_lose_nothing(helped, tmp_path, ends):
    """The first to build is another process, which comes before the measuring one."""
    first = f"Path({str(tmp_path / 'first')!r})"
    build_once = f"{first}.exists() or ({first}.touch(), {ends})"
    out, built = helped("--warmers", "1", build=build_once)
    assert "[2/2]" in out and built_by(built, built[-1][0])


def test_none_is_left_when_the_run_ends(helped, tmp_path):
    helped("--warmers", "2", build="None if problem.V == 50 else time.sleep(0.2)")
    pids = {int(line.split()[0]) for line in (tmp_path / "built").read_text().splitlines()}
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):  # the time limit of a test ends this
        time.sleep(0.05)


def test_a_broken_file_is_no_reason_to_fail(fsbench, plugin, tmp_path):
    broken = plugin("broken", text="1 / 0")
    code, out, err = fsbench("run", *TINY, *broken, "--provider", "greedy", "--warmers", "2",
                             "--out", "x")  # fmt: skip
    assert code == 0 and "unavailable" in out, err


@pytest.mark.full
def test_what_they_leave_is_cleared_without_a_word(plugin, tmp_path):
    lock = "globals().setdefault('lock', __import__('multiprocessing').Lock())"
    options = [*TINY, *plugin(build=lock), "--warmers", "1", "--out", "x"]
    command = [sys.executable, "-m", "fsbench", "run", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "leaked" not in done.stderr
