"""Working folders, names and variables of the environment that commands are started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from plug_in import plug_in
from tiny_run import TINY

CAFE = os.fsdecode(b"caf\xe9")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1", "RANK": "0"}


def fsbench(*arguments, cwd, **env):
    """Return (exit code, stdout, stderr) of a process; bytes that are not UTF-8 are escaped."""
    done = subprocess.run(
        [sys.executable, "-m", "fsbench", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "COLUMNS": "200", **env},
        capture_output=True,
    )
    return done.returncode, os.fsdecode(done.stdout), os.fsdecode(done.stderr)


def test_a_removed_working_folder_is_one_line(tmp_path):
    (tmp_path / "gone").mkdir()
    code = (
        "import os, sys; os.rmdir(os.getcwd()); sys.argv = ['fsbench', *sys.argv[1:]];"
        "from fsbench.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        cwd=tmp_path / "gone",
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: working folder: No such file or directory: `cd` to one that exists\n"
    )


@pytest.mark.full
def test_folders_whose_names_are_not_utf_8_work(tmp_path):
    folder = tmp_path / CAFE
    folder.mkdir()
    (folder / "mine.py").write_text(plug_in())
    options = ["--provider-path", "mine.py", "--provider", "mine", "--out", folder / "x"]
    code, out, err = fsbench("run", *TINY, *options, cwd=folder)
    assert code == 0 and f"Wrote {folder}/x/results.csv" in out, err
    assert json.loads((folder / "x/env.json").read_text())["argv"][-1] == str(folder / "x")
    code, out, err = fsbench("report", folder, "--out", folder / "r", cwd=tmp_path)
    assert code == 0 and f"{CAFE}/r/index.html" in out, err


def test_a_long_folder_for_temporary_files_is_refused(tmp_path):
    folder = tmp_path / ("t" * 120)
    folder.mkdir()
    code, out, err = fsbench("run", *TINY, "--provider", "greedy", cwd=tmp_path, TMPDIR=str(folder))
    assert (code, out) == (2, "")
    assert err.startswith("error: TMPDIR: expected a folder whose name has at most 66 bytes; got")
    assert list(folder.iterdir()) == [] and [*tmp_path.iterdir()] == [folder]


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_variables_of_torchrun_that_are_missing_are_named(tmp_path, name):
    env = {**TORCHRUN, name: ""}
    options = ["--tp", "2", "--provider", "greedy", "--out", "x"]
    code, out, err = fsbench("run", *TINY, *options, cwd=tmp_path, **env)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {name}: expected the number that torchrun sets, since TORCHELASTIC_RUN_ID is "
        "set; got ''\n"
    )
    assert list(tmp_path.iterdir()) == []
