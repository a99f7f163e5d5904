"""Output of --help on a terminal of 80 columns, and shell completion."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.discover import discover
from fsbench.problem import models

COMMANDS = [command.name for command in app.registered_commands]


@pytest.mark.parametrize("words", [[], ["run"], ["list"], ["hotvocab"], ["hotvocab", "size"]])
def test_h_is_help(words):
    requested, short = (CliRunner().invoke(app, [*words, option]) for option in ("--help", "-h"))
    assert short.exit_code == 0 and short.stdout == requested.stdout


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_paragraphs_are_wrapped_where_the_terminal_ends(command):
    words = [command, "--help"] if command else ["--help"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert "…" not in done.stdout  # a word that was cut
    lines = [line.strip() for line in done.stdout.split("╭")[0].splitlines()]
    assert max(map(len, lines)) <= 80
    for line, below in pairwise(lines):
        if line and below:  # the first word of the next line had no room
            assert len(line) + 1 + len(below.split()[0]) > 78, line


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("run --provider flash", [name for name in discover() if name.startswith("flash")]),
        ("recommend --model ", list(models())),
        ("run --model qwen3-8b,phi", ["qwen3-8b,phi-4"]),
        ("verify --dtype b", ["bf16"]),
        ("re", ["report", "recommend"]),
    ],
)
def test_a_shell_completes(words, names):
    start = "import sys; sys.argv = ['fsbench']; from fsbench.cli import main; main()"
    typed = ["fsbench", *words.split(" ")]
    setting = {"COMP_WORDS": " ".join(typed), "COMP_CWORD": str(len(typed) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", start],
        env={"_FSBENCH_COMPLETE": "complete_bash", "PYTHONPATH": ":".join(sys.path), **setting},
        capture_output=True,
        text=True,
    )
    assert sorted(done.stdout.split()) == sorted(names), done.stderr


def test_the_module_names_the_command_in_its_completion():
    # The shell is what the command's parent is: with one command only, bash would become it.
    words = ["bash", "-c", f"{sys.executable} -m fsbench --show-completion; true"]
    setting = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(words, env=setting, capture_output=True, text=True)
    assert "_FSBENCH_COMPLETE=" in done.stdout and done.stdout.endswith(" fsbench\n"), done.stderr
