"""tools/record_verify.py: every sampler once, and again only what is missing."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
import record_verify
from tree import ROOT

TOOL = ROOT / "tools" / "record_verify.py"
NAMES = ("greedy", "multinomial")


def record(folder, *names):
    command = [sys.executable, TOOL, folder, "--device", "cpu", "--tier", "gate", "--jobs", "2"]
    command += [part for name in names or NAMES for part in ("--provider", name)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verify") / "new"
    done = record(folder)
    assert done.returncode == 0, done.stderr
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        "greedy passed",
        "multinomial passed",
    ]
    return folder


def test_it_records_every_check_and_the_machine(folder):
    rows = list(csv.DictReader((folder / "verify.csv").read_text().splitlines()))
    assert [(row["sampler"], row["check"], row["verdict"]) for row in rows] == [
        ("greedy", "greedy", "ok"),
        ("greedy", "conclusion", "passed"),
        ("multinomial", "fit", "ok"),
        ("multinomial", "conclusion", "passed"),
    ]
    env = json.loads((folder / "env.json").read_text())
    assert env["device"] == "cpu" and env["setting"]["temperatures"] == [1.0, 0.5]


def test_only_what_has_no_conclusion_runs_again(folder):
    cut, whole = (folder / f"{name}.jsonl" for name in NAMES)
    kept = whole.stat().st_mtime_ns
    cut.write_text(cut.read_text()[:-9])
    assert record(folder).returncode == 0
    assert json.loads(cut.read_text().splitlines()[-1])["provider"] == "greedy"
    assert whole.stat().st_mtime_ns == kept


def test_all_that_run_here_are_judged():
    names = record_verify.samplers("cpu")
    assert set(NAMES) < set(names) and "matmul_only" not in names and "flash_sampling" not in names


def test_a_sampler_that_is_not_judged_is_said(folder):
    done = record(folder, "greedy", "no_such_sampler")
    assert done.returncode == 1
    assert "no_such_sampler: not judged: exit code 2: error: provider: expected" in done.stdout


def test_records_of_two_commits_are_not_mixed(folder):
    path = folder / "greedy.jsonl"
    whole = path.read_text()
    first, *rest = whole.splitlines(keepends=True)
    line = json.loads(first)
    line["environment"]["git_sha"] = "0000000"
    path.write_text(json.dumps(line) + "\n" + "".join(rest))
    done = record(folder)
    path.write_text(whole)
    assert done.returncode == 1 and "expected records of one git_sha; got" in done.stderr
