"""Damaged results: an error that names the file, exit code 2, never a traceback; stale tables."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import zlib
from dataclasses import replace

import pandas as pd
import pytest
from tiny_run import TINY
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.e2e import records as e2e
from fsbench.e2e.tables import write_tables
from fsbench.errors import ResultsError
from fsbench.records import disk, lines
from fsbench.records.cell import Round
from fsbench.records.store import Store, read_records
from fsbench.report.figures.style import SETTINGS

COMMANDS = ("run", "compare", "report", "plot")


@pytest.fixture(scope="module")
def run_once(tmp_path_factory):
    """A run, half of whose lines are from before checksums."""
    folder = tmp_path_factory.mktemp("once") / "good"
    done = CliRunner().invoke(app, ["run", "--preset", "smoke", *TINY, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    points = folder / "points.jsonl"
    lines = points.read_text().splitlines()
    for number in range(0, len(lines), 2):
        lines[number] = lines[number].rpartition(', "running_crc32": ')[0] + "}"
    for number in range(1, len(lines), 2):
        body = lines[number].rpartition(', "running_crc32": ')[0] + "}"
        lines[number] = f'{body[:-1]}, "crc32": {zlib.crc32(body.encode())}}}'
    points.write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def good(run_once, tmp_path, monkeypatch):
    """A copy of the run, and `only-csv`, which has no points.jsonl."""
    monkeypatch.setitem(SETTINGS, "savefig.dpi", 20)
    shutil.copytree(run_once, tmp_path / "good")
    shutil.copytree(run_once, tmp_path / "only-csv")
    (tmp_path / "only-csv" / "points.jsonl").unlink()
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


EXTREME = ("x", "", "-1", "1e999", "nan", "0", "1e-300", "1e300", "9" * 40)
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
    ways = ["byte", "byte", "cut", "gap", "type", "type", "type", "empty"]
    way = chance.choice([*ways, "columns", "columns"] if path.suffix == ".csv" else ways)
    position = chance.randrange(len(data))
    if way == "byte":
        data[position] = chance.randrange(256)
    elif way == "cut":
        del data[position:]
    elif way == "gap":
        del data[position : position + chance.randrange(1, 60)]
    elif way == "empty":
        data.clear()
    elif way == "columns":
        keep = chance.randrange(1, 60)
        rows = csv.reader(data.decode().splitlines())
        data = bytearray("\n".join(",".join(row[:keep]) for row in rows).encode())
    elif path.suffix == ".csv":
        lines = [line.split(",") for line in data.decode().splitlines()]
        line = lines[chance.randrange(1, len(lines))]
        line[chance.randrange(len(line))] = chance.choice(EXTREME)
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
    shutil.copytree(good, bad)
    name = chance.choice(["points.jsonl", "env.json", "results.csv"])
    if name == "results.csv" and command != "run":
        (bad / "points.jsonl").unlink()
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
    "seeds", [range(12), pytest.param(range(1020, 1044), marks=pytest.mark.full)], ids=["12", "24"]
)
def test_damage_is_named(fsbench, good, seeds):
    failed = []
    for seed in seeds:
        try:
            assert_named(fsbench, good, seed)
        except AssertionError as error:
            failed.append(f"{error}: {error.__cause__!r}")
    assert not failed, "\n".join(failed)


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
    table = good.parent / "only-csv" / "results.csv"
    for name, value, expected in (("median_us", "12a", "a number"), ("graph", "maybe", "True or")):
        lines = [line.split(",") for line in table.read_text().splitlines()]
        lines[1][lines[0].index(name)] = value
        table.write_text("\n".join(map(",".join, lines)))
        code, _, err = fsbench("plot", "only-csv")
        assert code == 2 and f"results.csv: {name}: expected {expected}" in err


def test_rows_are_derived_from_the_samples_even_if_the_table_is_newer(fsbench, good):
    """Modification times as after a clone, which sets all of them."""
    store = Store.resume(good, json.loads((good / "env.json").read_text()))
    new = replace(store.records[0].cell, provider="new", label="Brand new")
    store.append_round(new, 0, Round([9.0] * 4))
    store.close()
    stale = (good / "results.csv").read_bytes()
    os.utime(good / "results.csv", ns=(2**60, 2**60))
    code, out, err = fsbench(*arguments("compare", "good"))
    assert code == 0 and "new" in out, err
    assert fsbench(*arguments("report", "good"))[0] == 0
    assert "Brand new" in (good.parent / "report/cpu.html").read_text()
    assert (good / "results.csv").read_bytes() == stale  # it is the run's to write
    before = len(read_records(good))
    assert fsbench("run", "--resume", "good")[0] == 0
    assert "Brand new" in set(pd.read_csv(good / "results.csv")["label"])
    assert len(read_records(good)) == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("points.jsonl", "fifo"), ("env.json", "endless"), ("results.csv", "large")),
        *(("points.jsonl", "large"), ("env.json", "fifo"), ("results.csv", "endless")),
    ],
)
def test_a_special_or_too_large_file_is_refused(fsbench, good, monkeypatch, name, kind):
    """No command hangs at a FIFO or fills the memory."""
    for module, most in ((lines, "LONGEST"), (disk, "LARGEST")):
        monkeypatch.setattr(module, most, 2**12)
    folder = "only-csv" if name == "results.csv" else "good"
    path = good.parent / folder / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(bytes(2**13))
    for command in COMMANDS:
        if name == "results.csv" and command == "run":
            continue
        if name == "points.jsonl" or command != "plot":
            code, _, err = fsbench(*arguments(command, folder))
            assert code == 2 and name in err, (command, err)


VERDICT = {
    **dict(provider="mine", name="tail", verdict="FAILED", detail="seen", passed=False),
    **dict(draws=10, seconds=0.1, p_value=0.5, bound=None, detects=None),
}
VERDICTS = [
    {
        "schema": 2,
        "environment": {"device": "cpu", "gpu": "", "cpu": "Zen"},
        "setting": {"tier": "ci", "dtype": "fp32", "weights": "", "temperatures": [1.0, 0.5]},
    },
    {"provider": "mine", "source": "mine.py", "package": "a 1", "claims": {"noise": "token"}},
    VERDICT,
    {"provider": "other", "skipped": "it is not there"},
    {"provider": "mine", "conclusion": "rejected"},
]


def assert_records_named(fsbench, folder, seed):
    """One damage of a record of verify and of one of e2e: read, or refused in one line."""
    chance = random.Random(seed)
    record = folder / "verify.jsonl"
    record.write_text("".join(json.dumps(line) + "\n" for line in VERDICTS))
    way = damaged(record, chance)
    code, _, err = fsbench("verify", record)
    assert code in (0, 1, 2, 5) and "Traceback" not in err, f"seed {seed}: {way}: {err}"
    shutil.rmtree(folder / "e2e", ignore_errors=True)
    store = e2e.StepStore(folder / "e2e", {})
    case = e2e.Case("hf", "m", 8, 9, "fp32", 1, 2, "s", "S", True, True, "cpu", "")
    store.append(case, run=0, decoded=e2e.Decoded(4, 4, 1.0, 2.0, [1.0, 2.0], [2, 2], 1.0, 50.0))
    store.append(replace(case, sampler="t"), run=0, decoded=e2e.Decoded(4, 4, 1.0, 2.0, [1.0, 2.0]))
    store.append(case, profile=e2e.Profile(3, 1.0, None, 1.0, 2.0, {"a": 1.0}))
    store.append(case, run=0, drafting=e2e.Drafting(2.0, 1.0))
    store.append(case, counts={"served": 7})
    store.append(replace(case, sampler="u"), status="oom", reason="no memory")
    store.close()
    steps = folder / "e2e" / "steps.jsonl"
    texts = [line.rpartition(', "running')[0] + "}" for line in steps.read_text().splitlines()]
    steps.write_text("\n".join(texts) + "\n")
    way = damaged(steps, chance)
    try:
        write_tables(folder / "e2e")
    except ResultsError:
        pass
    except Exception as error:
        raise AssertionError(f"seed {seed}: e2e after {way}") from error


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(40, 104), marks=pytest.mark.full)], ids=["16", "64"]
)
def test_damaged_records_of_verify_and_e2e_are_named(fsbench, tmp_path, seeds):
    for seed in seeds:
        assert_records_named(fsbench, tmp_path, seed)
