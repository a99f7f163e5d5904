"""Damaged results: an error that names the file, exit code 2, never a traceback; stale tables."""

from __future__ import annotations

import json
import os
import random
import shutil

import pytest
from tiny_run import TINY

from fsbench.figures.style import SETTINGS

COMMANDS = ("run", "compare", "report", "plot")


@pytest.fixture
def good(fsbench, tmp_path, monkeypatch):
    """A run, half of whose lines are from before checksums."""
    monkeypatch.setitem(SETTINGS, "savefig.dpi", 20)
    assert fsbench("run", "--preset", "smoke", *TINY, "--out", "good")[0] == 0
    points = tmp_path / "good" / "points.jsonl"
    lines = points.read_text().splitlines()
    for number in range(0, len(lines), 2):
        lines[number] = lines[number].rpartition(', "crc32": ')[0] + "}"
    stat = points.stat()
    points.write_text("\n".join(lines) + "\n")
    os.utime(points, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return tmp_path / "good"


def arguments(command, folder):
    """Of a command that reads a folder."""
    return {
        "run": ["run", "--resume", folder],
        "compare": ["compare", folder, "good"],
        "report": ["report", folder],
        "plot": ["plot", folder, "--figure", "speedup"],
    }[command]


def values(node, path=()):
    """(path, value) of everything in a JSON document."""
    yield path, node
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from values(value, (*path, key))


WRONG = (None, "x", "", -1, 0, 1e999, 10**30, 2.5, True, [], {}, [1, "a"], {"a": 1}, "\ud800")


def retyped(text, chance):
    """A JSON document in which one value is another."""
    document = json.loads(text)
    path, _ = chance.choice([each for each in values(document) if each[0]])
    node = document
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = chance.choice(WRONG)
    return json.dumps(document)


def damaged(path, chance):
    """Damage a file in one of the ways that files are damaged in; returns what was done."""
    data = bytearray(path.read_bytes())
    way = chance.choice(["byte", "byte", "cut", "gap", "type", "type", "type", "empty"])
    at = chance.randrange(len(data))
    if way == "byte":
        data[at] = chance.randrange(256)
    elif way == "cut":
        del data[at:]
    elif way == "gap":
        del data[at : at + chance.randrange(1, 60)]
    elif way == "empty":
        data.clear()
    elif path.suffix == ".csv":
        lines = [line.split(",") for line in data.decode().splitlines()]
        line = lines[chance.randrange(1, len(lines))]
        line[chance.randrange(len(line))] = chance.choice(["x", "", "-1", "1e999", "nan", "0"])
        data = bytearray("\n".join(map(",".join, lines)).encode())
    elif path.suffix == ".jsonl":
        lines = data.decode().splitlines()
        number = chance.randrange(len(lines))
        lines[number] = retyped(lines[number], chance)
        data = bytearray(("\n".join(lines) + "\n").encode())
    else:
        data = bytearray(retyped(data, chance).encode())
    path.write_bytes(data)
    return way


def assert_named(fsbench, good, seed):
    """One damage, met by each command: it ends well, or with one line and exit code 2."""
    chance = random.Random(seed)
    command = COMMANDS[seed % len(COMMANDS)]
    bad = good.parent / "bad"
    shutil.rmtree(bad, ignore_errors=True)
    shutil.copytree(good, bad)  # with the times of the files
    name = chance.choice(["points.jsonl", "env.json", "results.csv"])
    if name == "points.jsonl" and chance.random() < 0.7:
        (bad / "results.csv").unlink()
    way = damaged(bad / name, chance)
    before = (bad / "env.json").read_bytes()
    try:
        code, _, err = fsbench(*arguments(command, "bad"))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {command} after {way} in {name}") from error
    assert code in (0, 2, 3), f"seed {seed}: {command} after {way} in {name}: {code} {err}"
    if code == 2:
        assert "Traceback" not in err
        if command == "run":
            assert (bad / "env.json").read_bytes() == before


@pytest.mark.parametrize("seed", range(24))
def test_damage_is_named(fsbench, good, seed):
    assert_named(fsbench, good, seed)


@pytest.mark.full
def test_damage_is_named_400_times(fsbench, good):
    failed = []
    for seed in range(1000, 1400):
        try:
            assert_named(fsbench, good, seed)
        except AssertionError as error:
            failed.append(f"{error}: {error.__cause__!r}")
    assert not failed, "\n".join(failed)
