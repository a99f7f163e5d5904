"""Fixtures of commands: the console script in a folder of its own, and a plug-in."""

from __future__ import annotations

import sys

import pytest

from fsbench import cli

PLUGIN = '''
"""A sampler that is right, and waits while it is held."""

import os
import time
from pathlib import Path

from fsbench.provider import Capabilities, Kind, Provider


def held():
    """HOLD=N:FILE: for as long as FILE has N lines."""
    number, _, path = os.environ.get("HOLD", "").partition(":")
    return path and Path(path).exists() and Path(path).read_bytes().count(b"\\n") >= int(number)


def build(problem, weight):
    def launch(hidden, seed, offset):
        while held():
            time.sleep(0.01)
        return (hidden @ weight.T).argmax(1){wrong}

    return launch


PROVIDER = Provider(
    name="{name}",
    label="Plug-in {name}",
    kind=Kind.{kind},
    build=build,
    capabilities=Capabilities(devices=("cpu",), dtypes=("fp32",), zero_temperature=True),
)
'''


@pytest.fixture
def plugin(tmp_path):
    """Writes a greedy sampler of this name; returns the options that name its file."""

    def write(name="mine", text=PLUGIN, kind="GREEDY", wrong=""):
        path = tmp_path / f"{name}.py"
        path.write_text(text.format(name=name, kind=kind, wrong=wrong))
        return ["--provider-path", str(path), "--provider", name]

    return write


@pytest.fixture
def fsbench(monkeypatch, capsys, tmp_path):
    """Calls the console script in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fsbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call
