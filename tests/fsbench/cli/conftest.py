"""Fixtures of commands: the console script in a new folder, and a plug-in."""

from __future__ import annotations

import sys

import pytest
from plug_in import plug_in

from fsbench import cli


@pytest.fixture
def plugin(tmp_path):
    """Writes the text, or a sampler of these parts; returns the options that name its file."""

    def write(name="mine", text="", **parts):
        path = tmp_path / f"{name}.py"
        path.write_text(text or plug_in(name, **parts))
        return ["--provider-path", str(path), "--provider", name]

    return write


@pytest.fixture
def fsbench(monkeypatch, capsys, tmp_path):
    """Call the console script in a new folder; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fsbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call
