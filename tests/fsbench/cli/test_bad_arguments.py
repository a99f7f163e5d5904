"""Every option of every command refuses bad values: one line, exit code 2, no trace."""

from __future__ import annotations

import math
import re
import sys
from functools import cache
from pathlib import Path
from typing import get_type_hints

import pytest
from cells import cell
from typer.models import OptionInfo

from fsbench import cli
from fsbench.errors import InvalidOption
from fsbench.records.cell import Round
from fsbench.records.store import Store
from fsbench.simple import sizing

LONG = "9" * 5000
NO_TEXT = ["", " ", "a\nb", "\udc80"]
NO_NAME = [*NO_TEXT, "nobody", LONG]
NO_PATH = [*NO_TEXT[:-1], "\ud800", "x" * 5000]  # bytes that are not UTF-8 can name a file
NO_FOLDER = [*NO_PATH, "a_file", "a_file/below"]
NO_RESULTS = [*NO_PATH, "missing", "empty"]
NO_PLUG_IN = [*NO_PATH, "missing.py", "empty", "a_file"]
BAD = {
    "INTEGER": ["", "x", "1.5", "nan", "9" * 30, LONG, "1_0"],
    "INTEGERS": ["", "x", "1,,2", "1;2", "1.5", "nan", "9" * 30, LONG],
    "NUMBER": ["", "x", "nan", "inf", "-inf", "1e999", "1,5"],
    "NUMBERS": ["", "x", "nan", "-1", "1.5", "0.5,"],
    "NAME": NO_NAME,
    "NAMES": NO_NAME,
    "DISTRIBUTION": [*NO_TEXT, "flat", "normal:-1", f"peaked:{LONG}"],
    "SIZES": ["", "x", "1,,2", "0", "1:", "2:1", "0:3", "1:999999999999"],
    "PERCENT": ["", "x", "-1", "100", "nan", "3%%"],
}
"""Metavar -> bad values; values next to the bounds are derived from the message of the option."""

OPTIONS = {
    "--provider-path": NO_PLUG_IN, "--resume": NO_RESULTS, "--out": NO_FOLDER,
    "--output": [*NO_PATH, "empty", "a_file/below"], "--results": NO_RESULTS, "--run": NO_RESULTS,
    "--measured": NO_RESULTS, "--fail-on": ["", "slow:", "fast", "slow:x"], "RESULTS": NO_RESULTS,
    "RECORDS": NO_RESULTS, "FOLDER": NO_RESULTS, "--model": ["", "qwen3-9b", "qwen3-8b,"],
    "--trace": [*NO_PATH, "missing", "empty", "a_file"], "--figure": [*NO_NAME, "tpot", "runtime,"],
    "--paper": [*NO_NAME, "h1000"],
}  # fmt: skip
"""Option -> bad values, in place of those of its metavar."""
COMMAND_OPTIONS = {
    ("run", "--gpu"): ["", "x", "-1", "7"], ("run", "--top-p"): ["", "x", "nan", "0", "1.5"],
    ("e2e", "--tp"): ["", "x", "0", "2"], ("e2e", "--speculate"): ["", "0", "127"],
    ("tune", "--kernel"): NO_TEXT, ("tune", "--model"): NO_TEXT,
    ("tune", "--provider-path"): NO_PATH,
    ("hotvocab pipeline", "--sampler"): [*NO_TEXT, "x", "x:", ":1", "x:y", "x:inf", "x:1:-5",
                                         "x:-9999"],
}  # fmt: skip
"""(command, option) -> bad values that only the command refuses."""

RIGHT = {
    "run": ["--device", "cpu", "--dry-run", "--d", "8", "--v", "9"],
    "verify": ["--provider", "greedy", "--tier", "gate"],
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
"""Arguments that a command accepts, before those that it must refuse."""


@cache
def parameters() -> dict[tuple[str, str], OptionInfo]:
    """(command, option or name of the argument) -> its declaration, for each with a parser."""
    result = {}
    for group, app in {"": cli.app, "hotvocab ": cli.hotvocab.app}.items():
        for command in app.registered_commands:
            name = command.name or command.callback.__name__
            for hint in get_type_hints(command.callback, include_extras=True).values():
                for info in getattr(hint, "__metadata__", ()):
                    if info.parser:
                        # In Annotated, typer reads the name of an option from its `default`.
                        option = info.default if isinstance(info, OptionInfo) else info.metavar
                        result[group + name, option] = info
    return result


def beyond_bounds(parse) -> list[str]:
    """Return the values next to the bounds of a number, which the message of its parser names."""
    try:
        parse("x")
    except InvalidOption as error:
        bounds = (
            r"expected (?:an integer|integers|a number) (from|above) (-?[\d.e+]+)(?: to (\d+) )?"
        )
        if match := re.search(bounds, f"{error}"):
            below = int(match[2]) - 1 if match[3] else math.nextafter(float(match[2]), -math.inf)
            return [
                match[2] if match[1] == "above" else str(below),
                *([str(int(match[3]) + 1)] if match[3] else []),
            ]
    return []


def bad_values(command: str, name: str) -> list[str]:
    info = parameters()[command, name]
    values = COMMAND_OPTIONS.get((command, name)) or OPTIONS.get(name) or BAD.get(info.metavar)
    values = values or (NO_NAME if info.metavar.startswith("[") else [])
    assert values, (command, name, info.metavar)
    return [*values, *beyond_bounds(info.parser)]


def is_refused_by_parser(command: str, name: str, value: str) -> bool:
    try:
        parameters()[command, name].parser(value)
    except InvalidOption as error:
        text = " ".join(str(error).split())
        assert (
            name.strip("-") in text and "expected" in text and "got" in text and len(text) < 1200
        ), text
        return True
    return False


def cases() -> list[tuple[str, str, str]]:
    """The values that only the command refuses, and one per option that its parser refuses."""
    result = []
    for key in parameters():
        values = {value: is_refused_by_parser(*key, value) for value in bad_values(*key)}
        parsed = [value for value, by_parser in values.items() if by_parser]
        result += [(*key, value) for value in values if value not in parsed[1:]]
    return result


class Reached(Exception):
    """A command has begun with its work."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A working folder with a file, an empty folder and results."""
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("text")
    Path("empty").mkdir()
    store = Store.create(Path("results"), {"gpu": "NVIDIA H200", "device": "cuda"})
    for name in ("flash_sampling_token", "multinomial"):
        columns = dict(provider=name, fused=name != "multinomial", b=1, d=4096, v=151936)
        store.append_round(cell(**columns), 0, Round([1.0] * 8))
    store.close()

    def reached(*arguments, **keywords):
        raise Reached

    for work in ("fsbench.verify.verify", "fsbench.e2e.measure.measure"):
        monkeypatch.setattr(work, reached)
    monkeypatch.setattr(sizing, "scans", reached)
    return tmp_path


def call(monkeypatch, capsys, *arguments):
    """Return (exit code, stderr) of the console script; other errors than fsbench's are raised."""
    monkeypatch.setattr(sys, "argv", ["fsbench", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    return exit_.value.code or 0, capsys.readouterr().err


def refused(folder, monkeypatch, capsys, command, name, value):
    """Assert that a command refuses a value, names it, and writes nothing."""
    before = sorted(folder.rglob("*"))
    right = RIGHT.get(command, [])
    added = [name, value]
    if name.isupper():
        right = [word for word in right if word not in ("results", "folder")]
        added = ["--", value, *(["results"] if command == "compare" else [])]
    code, err = call(monkeypatch, capsys, *command.split(), *right, *added)
    words = " ".join(err.replace("│", " ").split())
    assert code == 2, (command, name, value, words)
    assert name.strip("-") in words or (value and value in words), words
    assert "expected" in words or "not a results folder" in words, words
    assert "got" in words or value in words, words
    assert len(words) < 1500, words
    assert sorted(folder.rglob("*")) == before


def test_every_option_has_bad_values_and_every_command_right_ones():
    assert {command for command, _ in parameters()} - {"hotvocab fit", "list"} == set(RIGHT)
    assert sum(len(bad_values(*key)) for key in parameters()) > 900
    assert len(cases()) < 240  # the parsers refuse most of them


@pytest.mark.parametrize("command", sorted(RIGHT.keys() - {"hotvocab size"}))
def test_right_arguments_are_not_refused(folder, monkeypatch, capsys, command):
    try:
        code, err = call(monkeypatch, capsys, *command.split(), *RIGHT[command])
    except Reached:
        return
    assert code in (0, 4), err


@pytest.mark.parametrize("part", range(4))
def test_a_sample_of_bad_values_is_refused(folder, monkeypatch, capsys, part):
    for case in cases()[part::80]:
        refused(folder, monkeypatch, capsys, *case)


@pytest.mark.full
@pytest.mark.parametrize("command", sorted({command for command, _ in parameters()}))
def test_every_bad_value_is_refused(folder, monkeypatch, capsys, command):
    for case in cases():
        if case[0] == command:
            refused(folder, monkeypatch, capsys, *case)
