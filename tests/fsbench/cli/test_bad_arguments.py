"""Every option of every command refuses what it cannot use: one line, exit code 2, no trace."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer

from fsbench import cli
from fsbench.records.cell import Cell, Round
from fsbench.records.store import Store
from fsbench.simple import sizing

LONG = "9" * 5000
NO_TEXT = ["", " ", "a\nb", "\udc80"]
NO_NUMBER = ["", "x", "nan", "inf", "-inf", "1e999", "1,5"]
NO_INTEGER = ["", "x", "1.5", "nan", "9" * 30, LONG, "1_0"]
NO_INTEGERS = ["", "x", "1,,2", "1;2", "1.5", "nan", "9" * 30, LONG]
NO_NAME = [*NO_TEXT, "nobody", LONG]
NO_PATH = [*NO_TEXT[:-1], "\ud800", "x" * 5000]  # bytes that are not UTF-8 may name a file
NO_FOLDER = [*NO_PATH, "a_file", "a_file/below"]
NO_MODEL = ["", "qwen3-9b", "qwen3-8b,"]
NO_RESULTS = [*NO_PATH, "missing", "empty"]
BAD = {
    "size": [*NO_INTEGER, "0", "-1"],
    "sizes": [*NO_INTEGERS, "0", "-1"],
    "count": [*NO_INTEGER, "-1"],
    "name": NO_NAME,
    "plug-in": [*NO_PATH, "missing.py", "empty", "a_file"],
    "above 0": [*NO_NUMBER, "0", "-1"],
    "not below 0": [*NO_NUMBER, "-1"],
    "number": NO_NUMBER,
    "share": [*NO_NUMBER, "0", "-1", "1.1"],
    "seed": [*NO_INTEGER, str(2**70), str(-(2**70))],
    "models": NO_MODEL,
    "results": NO_RESULTS,
    "folder": NO_FOLDER,
    "file": [*NO_PATH, "empty", "a_file/below"],
    "percent": ["", "x", "-1", "100", "nan", "3%%"],
}
OPTIONS = {
    "run": {
        "--preset": "name", "--provider": "name", "--provider-path": "plug-in", "--batch": "sizes",
        "--d": "sizes", "--v": "sizes", "--model": "models", "--tp": "sizes",
        "--gpu": [*NO_INTEGERS, "-1", "7"], "--device": "name", "--dtype": "name",
        "--temperature": "not below 0", "--top-k": [*NO_INTEGERS, "-1"],
        "--top-p": ["", "x", "nan", "0", "-1", "1.5", "0.5,"],
        "--min-p": ["", "x", "nan", "-1", "1.5", "0.5,"], "--repetition-penalty": "above 0",
        "--presence-penalty": "number", "--frequency-penalty": "number", "--history": "size",
        "--timer": "name", "--l2": "name", "--warmup": "count", "--iters": "size",
        "--rounds": "size", "--logits": [*NO_TEXT, "flat", "normal:-1", f"peaked:{LONG}"],
        "--seed": "seed", "--out": "folder", "--resume": NO_RESULTS, "--timeout": "above 0",
        "--energy": [*NO_NUMBER, "0", "-1", "0.1"], "--sustained": [*NO_NUMBER, "0", "-1", "0.1"],
        "--warmers": "count", "--weights": "name",
    },
    "verify": {
        "--provider": "name", "--provider-path": "plug-in", "--tier": "name", "--check": "name",
        "--device": "name", "--dtype": "name", "--temperature": "above 0", "--output": "file",
        "--weights": "name", "RECORDS": [*NO_PATH, "missing", "empty"],
    },
    "export": {"RESULTS": "results", "--out": "folder"},
    "tune": {
        "--kernel": NO_TEXT, "--batch": "sizes", "--d": "sizes", "--v": "sizes", "--model": NO_TEXT,
        "--limit": "size", "--timer": "name", "--out": "folder", "--provider-path": NO_PATH,
    },
    "plot": {
        "RESULTS": "results", "--out": "folder", "--figure": [*NO_NAME, "tpot", "runtime,"],
        "--format": [*NO_NAME, "png,"],
    },
    "report": {"RESULTS": "results", "--out": "folder"},
    "compare": {
        "RESULTS": "results", "--paper": "name", "--fused": NO_NAME, "--within": "percent",
        "--fail-on": ["", "slow:", "fast", "slow:x"],
    },
    "iomodel": {
        "--batch": "sizes", "--d": "sizes", "--v": "sizes", "--model": "models", "--gpu": "name",
        "--dtype": "name", "--measured": "results",
    },
    "recommend": {
        "--model": NO_MODEL, "--d": "size", "--v": "size", "--gpu": NO_NAME,
        "--batch": [*NO_INTEGERS, "0", "1:", "2:1", "0:3", "1:999999999999"], "--needs": "name",
        "--dtype": "name", "--memory": "not below 0", "--results": "results", "--top-k": "count",
        "--top-p": [*NO_NUMBER, "0", "-1", "1.5"], "--min-p": [*NO_NUMBER, "-1", "1.5"],
        "--tp": [*NO_INTEGER, "0", "65"], "--logits": [*NO_TEXT, "flat", "normal:-1"],
        "--temperature": [*NO_NUMBER, "-1"],
    },
    "list": {"--provider-path": "plug-in"},
    "doctor": {},
    "warm": {
        "--model": "models", "--d": "sizes", "--v": "sizes", "--dtype": "name", "--batch": "sizes",
        "--request": [*NO_NAME, "plain,"], "--gpu": "name", "--processes": "size",
    },
    "e2e": {
        "--engine": "name", "--model": NO_MODEL, "--batch": "sizes", "--sampler": NO_NAME,
        "--requests": NO_NAME, "--tp": [*NO_INTEGERS, "0", "2"], "--runs": "size",
        "--prompt-tokens": "size", "--output-tokens": [*NO_INTEGER, "3"], "--dtype": "name",
        "--device": "name", "--profiles": "size",
        "--speculate": [*NO_INTEGER, "0", "-1", "127"], "--drafter": NO_NAME,
        "--memory": "share", "--seed": [*NO_INTEGER, "-1", str(2**70)], "--out": "folder",
    },
    "hotvocab fit": {
        "--v": [*NO_INTEGER, "63"], "--rows": [*NO_INTEGER, "3"], "--repeats": [*NO_INTEGER, "4"],
        "--trace": [*NO_PATH, "missing", "empty", "a_file"], "--out": "folder",
    },
    "hotvocab size": {
        "FOLDER": NO_RESULTS, "--c-us": "above 0", "--c0-us": "not below 0",
    },
    "hotvocab pipeline": {
        "--stages": [*NO_INTEGER, "0", "1000000"], "--stage-us": "above 0", "--batch": "size",
        "--in-flight": [*NO_INTEGERS, "0", "100000"], "--run": "results", "--d": "size",
        "--v": "size",
        "--sampler": [*NO_TEXT, "x", "x:", ":1", "x:y", "x:nan", "x:inf", "x:1:-5", "x:-9999"],
    },
}  # fmt: skip
"""Command -> option -> a name of BAD, or what it must refuse."""

RIGHT = {
    "run": ["--device", "cpu", "--dry-run", "--d", "8", "--v", "9"],
    "verify": ["--provider", "greedy", "--tier", "gate"],
    "export": ["results"],
    "plot": ["results", "--figure", "runtime"],
    "report": ["results"],
    "compare": ["results", "results"],
    "iomodel": ["--dtype", "fp32"],
    "recommend": ["--model", "qwen3-8b", "--results", "results"],
    "e2e": ["--device", "cpu"],
    "tune": ["--d", "8", "--v", "9"],
    "warm": ["--d", "8", "--v", "9"],
    "hotvocab size": ["folder", "--c-us", "1", "--c0-us", "1"],
    "hotvocab pipeline": ["--sampler", "x:1"],
}
"""Arguments that a command takes, before those that it must refuse."""

CASES = [
    (command, name, value)
    for command, options in OPTIONS.items()
    for name, kind in options.items()
    for value in (BAD[kind] if isinstance(kind, str) else kind)
]


class Reached(Exception):
    """A command has begun with its work."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a file, an empty folder and results."""
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("text")
    Path("empty").mkdir()
    store = Store.create(Path("results"), {"gpu": "NVIDIA H200", "device": "cuda"})
    conditions = dict(
        dtype="bf16", tp=1, temperature=1.0, logits="normal:1", timer="cupti", l2="cold"
    )
    shape = dict(b=1, d=4096, v=151936, gpu="NVIDIA H200", device="cuda", graph=True)
    for name in ("flash_sampling_token", "multinomial"):
        sampler_columns = dict(provider=name, label=name, kind="exact", fused=name != "multinomial")
        store.append_round(
            Cell.from_columns({**sampler_columns, **conditions, **shape}), 0, Round([1.0] * 8)
        )
    store.close()

    def reached(*arguments, **keywords):
        raise Reached

    for work in ("fsbench.verify.verify", "fsbench.e2e.measure.measure"):
        monkeypatch.setattr(work, reached)
    monkeypatch.setattr(sizing, "scans", reached)
    return tmp_path


def call(monkeypatch, capsys, *arguments):
    """(exit code, stderr) of the console script; raises whatever is no error of fsbench's."""
    monkeypatch.setattr(sys, "argv", ["fsbench", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0, capsys.readouterr().err


def arguments_of(command, name, value):
    words_ = [value] if name.isupper() else [name, value]
    right = RIGHT.get(command, [])
    if name.isupper():
        right = [word for word in right if word not in ("results", "folder")]
        words_ += ["results"] if command == "compare" else []
    return [*command.split(), *right, *(["--"] if name.isupper() else []), *words_]


def refused(folder, monkeypatch, capsys, command, name, value):
    """Asserts that a command refuses a value, in words, and writes nothing."""
    before = sorted(folder.rglob("*"))
    code, err = call(monkeypatch, capsys, *arguments_of(command, name, value))
    words = " ".join(err.replace("│", " ").split())
    assert code == 2, words
    assert name.strip("-") in words or (value and value in words), words
    assert "expected" in words or "not a results folder" in words, words
    assert "got" in words or value in words, words
    assert len(words) < 1500, words
    assert sorted(folder.rglob("*")) == before


def test_every_option_is_in_the_grid():
    result = {}

    def walk(command, path):
        for name, below in getattr(command, "commands", {}).items():
            walk(below, [*path, name])
        if not hasattr(command, "commands"):
            result[" ".join(path)] = {
                parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.metavar
                for parameter in command.params
                if not getattr(parameter, "is_flag", False)
            }

    walk(typer.main.get_command(cli.app), [])
    assert result.pop("audit") == result["verify"]  # another name of it
    assert result == {command: set(options) for command, options in OPTIONS.items()}
    assert len(CASES) > 330


@pytest.mark.parametrize("command", sorted(RIGHT))
def test_what_is_right_is_not_refused(folder, monkeypatch, capsys, command):
    if command == "hotvocab size":
        return  # their folder is made by others
    try:
        code, err = call(monkeypatch, capsys, *command.split(), *RIGHT[command])
    except Reached:
        return
    assert code in (0, 4), err


@pytest.mark.parametrize("part", range(7))
def test_a_sample_of_bad_values_is_refused(folder, monkeypatch, capsys, part):
    for case in CASES[part::70]:
        refused(folder, monkeypatch, capsys, *case)


@pytest.mark.full
@pytest.mark.parametrize(("command", "name"), sorted({case[:2] for case in CASES}))
def test_every_bad_value_is_refused(folder, monkeypatch, capsys, command, name):
    for case in CASES:
        if case[:2] == (command, name):
            refused(folder, monkeypatch, capsys, *case)
