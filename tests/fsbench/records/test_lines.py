"""The lines of points.jsonl: damage is noticed and named, and older lines are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cells import CELL, MACHINE, OTHER, numbers

from fsbench.errors import ResultsError
from fsbench.records.cell import Round
from fsbench.records.store import Store, read_environment, read_records


def without_checksums(folder: Path) -> str:
    """The lines of points.jsonl as they were written before they had checksums."""
    return re.sub(r', "crc32": \d+}', "}", (folder / "points.jsonl").read_text())


@pytest.mark.parametrize(
    "damage",
    [
        b"garbage",
        b"",
        b"5",
        b"{}",
        b'{"schema": 1, "cell": {}, "round": 0}',
        b"\xff\xfe",
        b'{"schema": 1, "cell": CELL, "status": "no such status", "reason": ""}',
        b'{"schema": 1, "cell": CELL, "round": 0, "measured": {"no_such_field": 1}}',
    ],
)
def test_damage_in_the_middle_names_file_and_line(folder, damage):
    points = folder / "points.jsonl"
    lines = points.read_bytes().split(b"\n")
    lines[1] = damage.replace(b"CELL", json.dumps(CELL.columns()).encode())
    points.write_bytes(b"\n".join(lines))
    for read in (read_records, lambda folder: Store.resume(folder, MACHINE)):
        with pytest.raises(ResultsError, match=r"points\.jsonl:2: not a results line"):
            read(folder)
    assert points.read_bytes() == b"\n".join(lines)  # resuming did not touch it


def test_another_schema_is_named(folder):
    old = without_checksums(folder).replace('{"schema": 1,', '{"schema": 7,', 1)
    (folder / "points.jsonl").write_text(old)
    with pytest.raises(ResultsError, match=r"points\.jsonl:1: expected schema 1; got 7"):
        read_records(folder)
    record = folder / "env.json"
    record.write_text(record.read_text().replace('"schema": 1', '"schema": 7'))
    with pytest.raises(ResultsError, match=r"env\.json: expected schema 1; got 7"):
        Store.resume(folder, MACHINE)


def test_every_changed_digit_of_a_line_is_noticed(folder):
    points = folder / "points.jsonl"
    whole = points.read_bytes()
    end = whole.index(b"\n")
    digits = [at for at in range(end) if whole[at : at + 1].isdigit()]
    assert len(digits) > 20
    for at in digits:
        digit = b"%d" % ((int(whole[at : at + 1]) + 1) % 10)
        points.write_bytes(whole[:at] + digit + whole[at + 1 :])
        with pytest.raises(ResultsError, match=r"points\.jsonl:1: "):
            read_records(folder)


@pytest.mark.parametrize(
    "changes",
    [
        *({"span_us": wrong} for wrong in ([], ["1"], [-1.0], [1e999], [True], 5, None)),
        *({"busy_us": [1.0, 2.0]}, {"n_kernels": 1.5}, {"peak_extra_bytes": 2**70}),
        *({"kernels": {"a": "b"}}, {"clocks": {"sm_mhz": "fast"}}, {"clocks": {"throttle": 1}}),
        *({"config": 1}, {"warm": "x"}, {"first_call_s": []}),
    ],
    ids=str,
)
def test_values_of_another_type_are_named(folder, changes):
    line = json.loads(without_checksums(folder).splitlines()[0])
    line["measured"] |= changes
    (folder / "points.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ResultsError, match=r"points\.jsonl:1: not a results line \(\w+: "):
        read_records(folder)


def test_folders_from_before_energy_and_forms_are_read(folder):
    """Lines as they were written before these fields existed."""
    path = folder / "points.jsonl"
    lines = [json.loads(line) for line in without_checksums(folder).splitlines()]
    for line in lines:
        for name in ("first_call_s", "warm", "turn"):
            line.get("measured", {}).pop(name, None)
    before = read_records(folder)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_records(folder) == before


def test_a_last_line_cut_anywhere_loses_that_line_only(folder):
    points = folder / "points.jsonl"
    whole = points.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1  # of the last line
    for end in range(start, len(whole)):
        points.write_bytes(whole[:end])
        assert numbers(read_records(folder)) == {"fast": [0, 1, 2]}, end
    # Resuming removes the rest of it, so that what is appended starts on a line of its own.
    store = Store.resume(folder, MACHINE)
    assert points.read_bytes() == whole[:start]
    store.append_round(OTHER, 0, Round([1.0]))
    store.close()
    assert numbers(read_records(folder)) == {"fast": [0, 1, 2], "slow": [0]}


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1', "\x00"])
def test_a_damaged_environment_record_is_named(folder, text):
    (folder / "env.json").write_text(text)
    with pytest.raises(ResultsError, match=r"env\.json: not an environment record"):
        read_environment(folder)
