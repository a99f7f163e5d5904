"""Runs that are killed, interrupted or out of space lose nothing and repeat nothing."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest
from plug_in import plug_in
from tiny_run import TINY

from fsbench import cli
from fsbench.records import lines
from fsbench.records.store import read_records

GREEDY = ["--provider", "greedy"]
ROUNDS = 8
EVERY = Counter(
    (name, b, number) for name in ("slow", "greedy") for b in (1, 3) for number in range(ROUNDS)
)


@pytest.fixture
def slow(tmp_path):
    """Options of a run with a sampler that waits as long as the file `hold` exists."""
    path, hold = tmp_path / "slow.py", f"Path({str(tmp_path / 'hold')!r})"
    wait = f"{hold}.with_name('hold-is-seen').touch(); time.sleep(0.01)"
    held = f"while step > 0 and {hold}.exists(): {wait}"
    path.write_text(plug_in("slow", launch=f"time.sleep(0.002)\n        {held}"))
    effort = ["--iters", str(ROUNDS), "--rounds", str(ROUNDS)]
    return [*TINY, *effort, "--provider-path", str(path), "--provider", "slow", *GREEDY]


def _main(folder, *arguments):
    os.chdir(folder)
    sys.argv = ["fsbench", *map(str, arguments)]
    sys.stdout = sys.stderr = open("said", "a", buffering=1)  # noqa: SIM115
    # The server of this test's process, which has torch already, is not a child of this one.
    forkserver.ensure_running = forkserver._forkserver.ensure_running = lambda: None
    try:
        cli.main()
    except SystemExit as exit_:
        os._exit(exit_.code or 0)


def ensure_server():
    """A fork server that answers.

    One whose client is killed between connecting and sending its descriptors ends by an EOFError,
    some time later: only a whole start, which waits behind that client, shows that it lives.
    """
    while True:
        process = multiprocessing.get_context("forkserver").Process(target=int)
        try:
            process.start()
        except (OSError, EOFError):
            time.sleep(0.01)  # the next start starts another server, once this one is gone
            continue
        return process.join()


@pytest.fixture
def started(tmp_path):
    """Starts `fsbench` as a process; those that are left at the end are killed."""
    processes = []
    multiprocessing.set_forkserver_preload(["fsbench.measure.worker"])

    def start(*arguments):
        ensure_server()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_main, args=(tmp_path, *arguments))
        process.start()
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.join()


def rounds(folder: Path) -> Counter:
    """Count each (sampler, B, round) in points.jsonl."""
    lines = map(json.loads, (folder / "points.jsonl").read_text().splitlines())
    return Counter((x["cell"]["provider"], x["cell"]["b"], x["round"]) for x in lines)


def complete(fsbench, folder):
    """Resume a run to its end, once all that was started by those that were killed is gone."""
    with mock.patch.object(lines, "PATIENCE", 3000.0):
        code, out, err = fsbench("run", "--resume", folder)
    assert code == 0, out + err
    assert rounds(folder) == EVERY


def kill_at_random(fsbench, slow, started, tmp_path, kills, seed):
    chance = random.Random(seed)
    folders, killed = 0, 0
    while killed < kills:
        folders += 1
        folder = tmp_path / f"run{folders}"
        while killed < kills:
            begun = (folder / "env.json").exists()
            process = started("run", *(["--resume", folder] if begun else [*slow, "--out", folder]))
            process.join(chance.uniform(0, 0.5))
            if process.exitcode is not None:
                # 2: what the process before it started was not gone yet.
                assert process.exitcode in (0, 2), (tmp_path / "said").read_text()[-3000:]
                if process.exitcode == 0:
                    break
            process.kill()
            process.join()
            killed += 1
            if (folder / "points.jsonl").exists():
                read_records(folder)  # readable at any instant
        if (folder / "env.json").exists():
            complete(fsbench, folder)
            assert not (folder / "running.json").exists()


def test_kills_at_random_instants_lose_and_repeat_nothing(fsbench, slow, started, tmp_path):
    kill_at_random(fsbench, slow, started, tmp_path, kills=4, seed=1)


@pytest.mark.full
def test_30_kills_at_random_instants(fsbench, slow, started, tmp_path):
    kill_at_random(fsbench, slow, started, tmp_path, kills=30, seed=2)


def test_two_resumes_at_once_measure_every_round_once(fsbench, slow, started, tmp_path):
    folder, hold = tmp_path / "x", tmp_path / "hold"
    hold.touch()
    first = started("run", *slow, "--out", folder)
    while not (folder / "running.json").exists():
        time.sleep(0.01)
    first.kill()
    first.join()
    both = [started("run", "--resume", folder) for _ in range(2)]
    while all(process.is_alive() for process in both):  # the one that waits for the lock gives up
        time.sleep(0.01)
    hold.unlink()
    for process in both:
        process.join()
    assert sorted(process.exitcode for process in both)[-1] == 2
    complete(fsbench, folder)


def test_the_cell_in_flight_when_all_died_is_measured_last(fsbench, slow, started, tmp_path):
    folder, hold = tmp_path / "x", tmp_path / "hold"
    hold.touch()
    first = started("run", *slow, "--out", folder)
    while not (tmp_path / "hold-is-seen").exists():
        time.sleep(0.01)
    first.kill()
    first.join()
    hold.unlink()
    complete(fsbench, folder)
    order = list(dict.fromkeys((name, b) for name, b, _ in rounds(folder)))
    assert order[-1] == ("slow", 1)


@pytest.mark.full
def test_an_interrupt_keeps_what_was_measured_and_says_how_to_go_on(slow, started, tmp_path):
    points = tmp_path / "x" / "points.jsonl"
    source = tmp_path / "slow.py"
    source.write_text(source.read_text().replace("step > 0", "step > 4"))
    (tmp_path / "hold").touch()
    process = started("run", *slow, "--out", "x")
    # A sampler that is held writes nothing: an interrupt would remove a line being written.
    held = tmp_path / "hold-is-seen"
    while not held.exists():
        assert process.is_alive()
        time.sleep(0.01)
    assert b'"round"' in points.read_bytes()
    os.kill(process.pid, signal.SIGINT)
    process.join()
    output = (tmp_path / "said").read_text()
    assert process.exitcode == 130
    assert "stopped; to continue: fsbench run --resume x" in output and "Traceback" not in output
    assert read_records(tmp_path / "x")


def test_resume_repeats_the_options_of_the_run_and_none_of_its_rounds(fsbench, tmp_path):
    fsbench("run", "--preset", "smoke", *TINY, "--temperature", "0.5", "--out", "x")
    before = (tmp_path / "x" / "points.jsonl").read_bytes()
    assert fsbench("run", "--resume", "x")[0] == 0
    assert (tmp_path / "x" / "points.jsonl").read_bytes() == before
    # What is given on top extends the run.
    fsbench("run", "--resume", "x", "--batch", "5")
    cells = [record.cell.problem for record in read_records(tmp_path / "x")]
    assert {(cell.B, cell.temperature) for cell in cells} == {(1, 0.5), (3, 0.5), (5, 0.5)}


@pytest.mark.full
def test_a_full_disk_is_one_line_and_the_run_can_be_continued(fsbench, tmp_path):
    """A limit on file sizes replaces a full disk: a write that crosses it is cut short."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))"
    code = f"{limit}\nfrom fsbench.cli import main\nmain()"
    arguments = ["run", "--preset", "smoke", *TINY, "--rounds", "4", "--out", "x"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    stopped, error = done.stderr.splitlines()[-2:]
    assert stopped == "stopped; to continue: fsbench run --resume x"
    assert error == "error: cannot write x/points.jsonl: File too large"
    assert "Traceback" not in done.stderr
    text = (tmp_path / "x" / "points.jsonl").read_bytes()
    assert 4000 < len(text) <= 6000 and text.endswith(b"\n")
    assert read_records(tmp_path / "x")
    assert fsbench("run", "--resume", "x")[0] == 0
    measured = rounds(tmp_path / "x")
    assert set(measured.values()) == {1} and len({name for name, _, _ in measured}) * 2 * 4 == len(
        measured
    )


def test_runs_that_start_within_a_second_have_folders_of_their_own(fsbench, tmp_path):
    for _ in range(2):
        assert fsbench("run", *TINY, *GREEDY)[0] == 0
    folders = list((tmp_path / "results" / "cpu").iterdir())
    assert len(folders) == 2 and all((folder / "results.csv").exists() for folder in folders)
