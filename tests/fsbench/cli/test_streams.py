"""Where standard output cannot take what a command prints: a full disk, an old encoding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def output_of(command, stdout, **setting):
    done = subprocess.run(
        [sys.executable, "-m", "fsbench", *command],
        env={**os.environ, "COLUMNS": "60", **setting},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        encoding="latin-1",
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "unbuffered"), [(["iomodel", "--json"], ""), (["--version"], "1")], ids=str
)
def test_a_full_disk_is_one_line(command, unbuffered):
    with open("/dev/full", "w") as full:
        code, output = output_of(command, full, PYTHONUNBUFFERED=unbuffered)
    assert (code, output) == (2, "error: cannot write: No space left on device\n")


@pytest.mark.parametrize(("command", "unbuffered"), [(["iomodel"], "1"), (["--version"], "")])
def test_a_reader_that_leaves_is_told_nothing(command, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        code, output = output_of(command, pipe, PYTHONUNBUFFERED=unbuffered)
    assert (code, output) == (1, "")


@pytest.mark.parametrize("command", [["iomodel"], ["run", "--help"]], ids=" ".join)
def test_what_an_encoding_lacks_is_replaced(command):
    code, output = output_of(command, subprocess.PIPE, PYTHONIOENCODING="latin-1")
    assert (code, output) == (0, "")


def test_a_terminal_of_no_columns_is_one_of_the_usual_width(tmp_path):
    with (tmp_path / "out").open("w") as out:
        code, output = output_of(["list"], out, COLUMNS="0")
    assert (code, output) == (0, "") and "flash_sampling" in (tmp_path / "out").read_text()
