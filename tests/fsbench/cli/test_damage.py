"""Damaged results: an error that names the file, exit code 2, never a traceback; stale tables."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace

import pandas as pd
import pytest
from tiny_run import TINY

from fsbench.records.cell import Round
from fsbench.records.store import Store, read_records
from fsbench.report.figures.style import SETTINGS

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


@pytest.mark.parametrize(
    "seeds", [range(24), pytest.param(range(1020, 1180), marks=pytest.mark.full)], ids=["24", "160"]
)
def test_damage_is_named(fsbench, good, seeds):
    failed = []
    for seed in seeds:
        try:
            assert_named(fsbench, good, seed)
        except AssertionError as error:
            failed.append(f"{error}: {error.__cause__!r}")
    assert not failed, "\n".join(failed)


def test_a_plot_of_a_run_whose_environment_is_damaged_is_refused(fsbench, good):
    (good / "env.json").write_text('{"schema": 1, "utc": ')
    code, _, err = fsbench("plot", "good", "--out", "figures")
    assert code == 2 and "env.json: not an environment record" in err


def test_options_that_are_none_end_a_resume_and_the_folder_stays_as_it_is(fsbench, good):
    path = good / "env.json"
    whole = json.loads(path.read_text())
    for options in (None, [], 5, {"iters": []}, {"provider": [1]}, {"provider_path": {"a": 1}}):
        damaged = {**whole, "options": options}
        if options is None:
            del damaged["options"]
        path.write_text(json.dumps(damaged))
        before = {each.name: each.read_bytes() for each in good.iterdir()}
        code, _, err = fsbench("run", "--resume", "good", "--batch", "7")
        assert code == 2 and "env.json" in err and "expected" in err, options
        assert before == {each.name: each.read_bytes() for each in good.iterdir()}


def test_letters_in_a_column_of_numbers_are_named(fsbench, good):
    table = good / "results.csv"
    for name, value, expected in (("median_us", "12a", "a number"), ("graph", "maybe", "True or")):
        lines = [line.split(",") for line in table.read_text().splitlines()]
        lines[1][lines[0].index(name)] = value
        table.write_text("\n".join(map(",".join, lines)))
        code, _, err = fsbench("plot", "good")
        assert code == 2 and f"results.csv: {name}: expected {expected}" in err


def test_a_table_that_is_older_than_its_samples_is_derived_again(fsbench, good):
    """As after a resume that was killed."""
    store = Store.resume(good, json.loads((good / "env.json").read_text()))
    new = replace(store.records[0].cell, provider="new", label="Brand new")
    store.append_round(new, 0, Round([9.0] * 4))
    store.close()
    os.utime(good / "results.csv", ns=(0, 0))
    stale = (good / "results.csv").read_bytes()
    for command in ("compare", "report", "plot"):
        code, out, err = fsbench(*arguments(command, "good"))
        assert code == 0, err
        if command == "compare":
            assert "new" in out
    assert "Brand new" in (good.parent / "report/cpu.html").read_text()
    assert (good / "results.csv").read_bytes() == stale  # it is the run's to write
    assert fsbench("run", "--resume", "good")[0] == 0
    assert "Brand new" in set(pd.read_csv(good / "results.csv")["label"])
    assert len(read_records(good)) == 7
