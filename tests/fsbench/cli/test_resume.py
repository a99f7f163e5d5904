"""Runs that are killed, interrupted or out of space can be read, and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pandas as pd
import pytest
from tiny_run import TINY

from fsbench.records.store import read_records


def test_resume_repeats_the_options_of_the_run_and_none_of_its_rounds(fsbench, tmp_path):
    fsbench("run", "--preset", "smoke", *TINY, "--temperature", "0.5", "--out", "x")
    before = (tmp_path / "x" / "points.jsonl").read_bytes()
    assert fsbench("run", "--resume", "x")[0] == 0
    assert (tmp_path / "x" / "points.jsonl").read_bytes() == before
    # What is given on top extends the run.
    fsbench("run", "--resume", "x", "--batch", "5")
    cells = [record.cell.problem for record in read_records(tmp_path / "x")]
    assert {(cell.B, cell.temperature) for cell in cells} == {(1, 0.5), (3, 0.5), (5, 0.5)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "env.json: expected schema 1; got 99"),
        ({"cpu": "another CPU"}, "was measured on another machine: expected cpu "),
        ({"gpu": "NVIDIA H200"}, "was measured on another machine: expected gpu ''"),
    ],
)
def test_resuming_another_schema_or_machine_is_refused(fsbench, tmp_path, change, message):
    fsbench("run", "--preset", "smoke", *TINY, "--out", "x")
    path = tmp_path / "x" / "env.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    code, _, err = fsbench("run", "--resume", "x")
    assert code == 2 and len(err.splitlines()) == 1 and message in err


def _script(*arguments, setup=""):
    code = f"{setup}\nfrom fsbench.cli import main\nmain()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def _rounds(folder):
    """How often each (sampler, B, round) stands in points.jsonl."""
    return Counter(
        (record["cell"]["provider"], record["cell"]["b"], record["round"])
        for record in map(json.loads, (folder / "points.jsonl").read_text().splitlines())
    )


def _held_run(tmp_path, lines, *arguments, **options):
    """A run into the folder x, which stands still with so many rounds or a few more measured."""
    points = tmp_path / "x" / "points.jsonl"
    process = subprocess.Popen(
        _script("run", *arguments, "--out", "x"),
        cwd=tmp_path,
        env={**os.environ, "HOLD": f"{lines}:{points}"},
        **options,
    )
    while not points.exists() or points.read_bytes().count(b"\n") < lines:
        assert process.poll() is None
        time.sleep(0.005)
    return process


def test_a_killed_run_is_readable_and_resume_completes_it_without_repeating(
    fsbench, plugin, tmp_path
):
    options = [*TINY, *plugin("slow"), "--provider", "matmul_only"]
    options += ["--batch", "1,2,3", "--iters", "12", "--rounds", "6"]
    folder = tmp_path / "x"
    process = _held_run(tmp_path, 15, *options, stderr=subprocess.DEVNULL)
    process.kill()
    process.wait()
    records = read_records(folder)
    measured = sum(len(record.rounds) for record in records)
    assert 15 <= measured < 36
    assert not (folder / "results.csv").exists()
    # As if the kill had come in the middle of a line.
    with (folder / "points.jsonl").open("a") as points:
        points.write('{"schema": 1, "cell": {"provi')
    assert read_records(folder) == records
    assert fsbench("run", "--resume", folder)[0] == 0
    every = [(name, b, n) for name in ("slow", "matmul_only") for b in (1, 2, 3) for n in range(6)]
    assert _rounds(folder) == Counter(every)
    table = pd.read_csv(folder / "results.csv")
    assert set(table["status"]) == {"ok"} and set(table["n_samples"]) == {12}


@pytest.mark.full
def test_a_full_disk_is_one_line_and_the_run_can_be_continued(fsbench, tmp_path):
    """A limit on the size of files stands for the disk: a write that crosses it is cut short."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))"
    arguments = ["run", "--preset", "smoke", *TINY, "--rounds", "4", "--out", "x"]
    done = subprocess.run(
        _script(*arguments, setup=limit), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    stopped, error = done.stderr.splitlines()[-2:]
    assert stopped == "stopped; to continue: fsbench run --resume x"
    assert error == "error: cannot write results in x: File too large"
    assert "Traceback" not in done.stderr
    text = (tmp_path / "x" / "points.jsonl").read_bytes()
    assert len(text) == 6000 and not text.endswith(b"\n")
    before = read_records(tmp_path / "x")
    assert before
    assert fsbench("run", "--resume", "x")[0] == 0
    assert set(_rounds(tmp_path / "x").values()) == {1}
    assert len(_rounds(tmp_path / "x")) == 3 * 2 * 4


@pytest.mark.full
def test_an_interrupt_keeps_what_was_measured_and_says_how_to_go_on(plugin, tmp_path):
    arguments = [*TINY, *plugin("slow"), "--iters", "50", "--rounds", "50"]
    process = _held_run(
        tmp_path,
        2,
        *arguments,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore it, and so would the child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "stopped; to continue: fsbench run --resume x" in err and "Traceback" not in err
    assert read_records(tmp_path / "x")
