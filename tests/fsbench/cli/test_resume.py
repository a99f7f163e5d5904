"""Runs that are killed, interrupted or out of space can be read, and resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

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
