"""The lines of points.jsonl: damage is noticed and named, and older lines are read."""

from __future__ import annotations

import errno
import json
import os
import re
import zlib
from pathlib import Path

import pytest
from cells import CELL, MACHINE, OTHER, numbers

from fsbench.errors import ResultsError
from fsbench.records import lines as lines_of
from fsbench.records.cell import Round
from fsbench.records.disk import write_atomically
from fsbench.records.lines import Lines, LockedFile, read_lines
from fsbench.records.store import Store, read_environment, read_records


def without_checksums(folder: Path) -> str:
    """The lines of points.jsonl as they were written before they had checksums."""
    return re.sub(r', "(running_)?crc32": \d+}', "}", (folder / "points.jsonl").read_text())


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
    lines = without_checksums(folder).encode().split(b"\n")
    lines[1] = damage.replace(b"CELL", json.dumps(CELL.columns()).encode())
    points.write_bytes(b"\n".join(lines))
    for read in (read_records, lambda folder: Store.resume(folder, MACHINE)):
        with pytest.raises(ResultsError, match=r"points\.jsonl:2: not a results line"):
            read(folder)
    assert points.read_bytes() == b"\n".join(lines)  # resuming did not touch it


@pytest.mark.parametrize("way", ["removed", "repeated", "renamed"])
def test_a_line_removed_repeated_or_moved_is_noticed(folder, way):
    points = folder / "points.jsonl"
    whole = points.read_bytes().splitlines(keepends=True)
    for position in range(len(whole) - 1):
        lines = list(whole)
        if way == "removed":
            del lines[position]
        elif way == "repeated":
            lines.insert(position, lines[position])
        else:
            lines[position], lines[position + 1] = lines[position + 1], lines[position]
        points.write_bytes(b"".join(lines))
        with pytest.raises(ResultsError, match=r"jsonl:\d: not a results line \(its checks"):
            read_records(folder)


def test_a_last_line_that_is_missing_from_a_run_that_ended_is_noticed(folder):
    store = Store.resume(folder, MACHINE)
    store.append_round(CELL, 3, Round([1.0]))
    store.note_time({})
    store.append_round(CELL, 4, Round([1.0]))  # of a later run, which was killed
    store.close()
    points = folder / "points.jsonl"
    lines = points.read_bytes().splitlines(keepends=True)
    points.write_bytes(b"".join(lines[:-1]))
    assert len(read_records(folder)) == 2
    points.write_bytes(b"".join(lines[:-2]))
    with pytest.raises(ResultsError, match=r"expected 5 lines, as env\.json says; got 4"):
        read_records(folder)


@pytest.mark.parametrize("has_own_checksum", [True, False])
def test_a_round_recorded_twice_is_noticed_in_lines_of_any_age(folder, has_own_checksum):
    lines = without_checksums(folder).splitlines()
    lines.insert(1, lines[0])
    if has_own_checksum:  # as of version 0.2.0
        lines = [f'{x[:-1]}, "crc32": {zlib.crc32(x.encode())}}}' for x in lines]
    (folder / "points.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ResultsError, match=r"jsonl:2: .*the same round of the same cell"):
        read_records(folder)


def test_a_line_appended_to_older_lines_covers_them_by_its_checksum(folder):
    points = folder / "points.jsonl"
    points.write_text(without_checksums(folder))
    lines = Lines.open(points)
    lines.append({"schema": 1, "cell": OTHER.columns(), "status": "ok", "reason": ""})
    lines.close()
    assert len(read_records(folder)) == 2
    points.write_bytes(points.read_bytes().replace(b"10.0", b"90.0", 1))
    with pytest.raises(ResultsError, match=r"jsonl:5: .*a line before it was changed"):
        read_records(folder)


def test_another_schema_is_named(folder):
    old = without_checksums(folder).replace('{"schema": 1,', '{"schema": 7,', 1)
    (folder / "points.jsonl").write_text(old)
    with pytest.raises(ResultsError, match=r"points\.jsonl:1: expected schema 1; got 7"):
        read_records(folder)
    record = folder / "env.json"
    record.write_text(record.read_text().replace('"schema": 1', '"schema": 7'))
    with pytest.raises(ResultsError, match=r"env\.json: expected schema 1; got 7"):
        Store.resume(folder, MACHINE)


def test_a_changed_digit_of_a_line_is_noticed(folder):
    points = folder / "points.jsonl"
    whole = points.read_bytes()
    end = whole.index(b"\n")
    digits = [position for position in range(end) if whole[position : position + 1].isdigit()]
    assert len(digits) > 20
    for position in [*digits[::3], digits[-1]]:
        digit = b"%d" % ((int(whole[position : position + 1]) + 1) % 10)
        points.write_bytes(whole[:position] + digit + whole[position + 1 :])
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
    for end in [*range(start, start + 9), *range(start + 9, len(whole), 7), len(whole) - 1]:
        points.write_bytes(whole[:end])
        assert numbers(read_records(folder)) == {"fast": [0, 1, 2]}, end
    # Resuming removes the rest of it, so that the next line starts a new line.
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


@pytest.fixture
def lines(tmp_path):
    """A file of two lines, open for more."""
    opened = Lines.open(tmp_path / "x.jsonl")
    for number in range(2):
        opened.append({"number": number})
    yield opened
    opened.close()


def values(path):
    return [line.value for line in read_lines(path)]


def test_a_file_is_locked_until_it_is_closed(lines, monkeypatch):
    monkeypatch.setattr(lines_of, "PATIENCE", 0.0)
    with pytest.raises(LockedFile, match=r"x\.jsonl: another process is writing to it"):
        Lines.open(lines.path)
    lines.close()
    Lines.open(lines.path).close()


def test_a_write_that_fails_leaves_the_lines_before_it_and_the_next_one_succeeds(
    lines, monkeypatch
):
    """Half of a line is written, then the disk is full."""
    real = os.write

    def half(file, data):
        if len(data) < 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(ResultsError, match=r"cannot write .*x\.jsonl: No space left on device"):
        lines.append({"number": 2})
    monkeypatch.undo()
    assert values(lines.path) == [{"number": 0}, {"number": 1}]
    lines.append({"number": 3})
    assert values(lines.path)[-1] == {"number": 3}


CHANGES = {
    "remove": lambda path: path.unlink(),
    "rename": lambda path: path.rename(path.with_name("new.jsonl")),
    "rename the folder": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
    "replace": lambda path: write_atomically(path, path.read_bytes()),
    "empty": lambda path: path.write_bytes(b""),
    "extend": lambda path: path.write_bytes(path.read_bytes() + b"{}\n"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_others_move_or_change_is_noticed_at_the_next_line(tmp_path, name):
    (tmp_path / "run").mkdir()
    opened = Lines.open(tmp_path / "run" / "x.jsonl")
    opened.append({"number": 0})
    CHANGES[name](opened.path)
    with pytest.raises(ResultsError, match=r"it was removed or renamed|something else changed it"):
        opened.append({"number": 1})
    opened.close()


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "text", "unended", "endless"])
def test_other_files_are_refused_and_not_changed(tmp_path, monkeypatch, kind):
    path = tmp_path / "x"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text({"text": "a\nb\n", "unended": "notes", "endless": "x" * 100}[kind])
    if kind == "endless":
        monkeypatch.setattr(lines_of, "LONGEST", 50)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(ResultsError, match=r"expected lines|not a re(gular|sults)|a directory"):
        Lines.open(path)
    if kind != "unended":  # may be a line that was cut short
        with pytest.raises(ResultsError):
            values(path)
    assert before is None or path.read_bytes() == before
