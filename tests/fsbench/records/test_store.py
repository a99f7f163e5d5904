"""The results store: nothing is lost, damage is named, and a folder can always be continued."""

from __future__ import annotations

import errno
import gzip
import json
import os

import pytest
from cells import CELL, MACHINE, OTHER, cell, numbers
from hypothesis import given, settings
from hypothesis import strategies as st

from fsbench.errors import ResultsError
from fsbench.records import lines as lines_of
from fsbench.records.cell import FORMS, LACKS, STATUSES, Host, Loop, Round
from fsbench.records.disk import write_atomically
from fsbench.records.store import (
    Store,
    folders_below,
    read_environment,
    read_records,
    results_folders,
)

times = st.lists(st.floats(0, 1e7), min_size=3, max_size=3)
rounds = st.builds(
    Round,
    span_us=times,
    busy_us=times | st.just([]),
    sum_us=times | st.just([]),
    n_kernels=st.none() | st.integers(0, 99),
    kernels=st.dictionaries(st.text(max_size=8), st.floats(0, 1e6), max_size=2),
    clocks=st.dictionaries(
        st.sampled_from(["sm_mhz", "power_w"]), st.none() | st.floats(0, 3000), max_size=2
    ),
    config=st.text(max_size=12),
    peak_extra_bytes=st.none() | st.integers(0, 2**40),
    first_call_s=st.none() | st.floats(0, 1e4),
    warm=st.lists(st.sampled_from(["triton", "process"]), max_size=2),
    turn=st.none() | st.integers(0, 40),
)
loops = st.builds(
    Loop,
    st.integers(1, 9999),
    st.floats(0.1, 9),
    st.none() | st.floats(0, 1e3),
    st.none() | st.floats(0, 700),
)
events = st.lists(
    st.tuples(
        st.sampled_from([CELL, OTHER, cell(b=3)]),
        st.tuples(st.integers(0, 4), rounds)
        | st.tuples(st.sampled_from(FORMS), st.tuples(st.integers(0, 4), rounds))
        | st.tuples(st.sampled_from(("energy", "sustained")), loops)
        | st.tuples(st.just("host"), st.builds(Host, st.floats(0.1, 1e6), st.integers(1, 999)))
        | st.tuples(st.just("lacks"), st.sampled_from(LACKS))
        | st.tuples(st.sampled_from(STATUSES[1:]), st.text(max_size=20)),
    ),
    max_size=8,
)


@given(events=events)
@settings(max_examples=15)
def test_appended_lines_are_read_back(tmp_path_factory, events):
    folder = tmp_path_factory.mktemp("store") / "run"
    store = Store.create(folder, MACHINE)
    for one, (kind, value) in events:
        if isinstance(value, Round):
            if kind not in store.record(one).rounds:
                store.append_round(one, kind, value)
        elif kind in FORMS:
            if value[0] not in store.record(one).forms.get(kind, {}):
                store.append_form(one, kind, *value)
        elif kind in ("energy", "sustained", "host"):
            store.append_extra(one, kind, value)
        elif kind == "lacks":
            store.append_lack(one, value, "it is not there")
        else:
            store.append_status(one, kind, value)
        assert read_records(folder) == store.records  # on disk at once, not only after close
    store.close()
    resumed = Store.resume(folder, MACHINE)
    resumed.close()
    assert resumed.records == store.records


def test_a_round_clears_an_earlier_status(folder):
    store = Store.resume(folder, MACHINE)
    store.append_round(OTHER, 0, Round([1.0]))
    store.close()
    for records in (store.records, read_records(folder)):
        other = records[1]
        assert (other.status, other.reason, sorted(other.rounds)) == ("ok", "", [0])


def test_the_same_status_is_not_written_twice(folder):
    before = (folder / "points.jsonl").read_bytes()
    store = Store.resume(folder, MACHINE)
    store.append_status(OTHER, "oom", "no memory left")
    assert (folder / "points.jsonl").read_bytes() == before
    store.append_status(OTHER, "oom", "another reason")
    store.close()
    assert read_records(folder)[1].reason == "another reason"


@pytest.mark.parametrize("name", ["gpu", "device", "cpu"])
def test_another_machine_is_refused(folder, name):
    with pytest.raises(ResultsError, match=f"another machine: expected {name} 'X'; got"):
        Store.resume(folder, {**MACHINE, name: "X"})


def test_resuming_is_recorded_with_its_environment(folder):
    for number, version in enumerate("abb"):
        store = Store.resume(folder, {**MACHINE, "torch": version})
        store.append_round(OTHER, number, Round([1.0]))
        store.append_round(CELL, 3 + number, Round([1.0]))
        store.close()
    Store.resume(folder, {**MACHINE, "torch": "measured nothing"}).close()
    environment = read_environment(folder)
    assert [record["torch"] for record in environment["resumed"]] == ["a", "b", "b"]
    assert environment["gpu"] == MACHINE["gpu"]


@pytest.mark.parametrize("name", ["points.jsonl", "results.csv"])
def test_a_folder_with_results_is_not_started_again(folder, name):
    for file in folder.iterdir():
        if file.name != name:
            file.unlink()
    (folder / name).write_text("precious")
    with pytest.raises(ResultsError, match="already holds results; use --resume"):
        Store.create(folder, MACHINE)
    assert [(file.name, file.read_text()) for file in folder.iterdir()] == [(name, "precious")]


@pytest.fixture
def packed(folder):
    """A record as it is committed."""
    points = folder / "points.jsonl"
    (folder / "points.jsonl.gz").write_bytes(gzip.compress(points.read_bytes()))
    points.unlink()
    return folder


def test_a_packed_record_is_read_and_not_continued(folder, packed):
    assert numbers(read_records(packed)) == {"fast": [0, 1, 2], "slow": []}
    assert folders_below(packed.parent) == [packed]
    with pytest.raises(ResultsError, match=r"expected points\.jsonl; unpack it by gunzip first"):
        Store.resume(packed, MACHINE)
    (packed / "results.csv").unlink(missing_ok=True)
    with pytest.raises(ResultsError, match="already holds results"):
        Store.create(packed, MACHINE)
    assert not (packed / "points.jsonl").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda data: data[:40] + data[90:],
                                    lambda data: b"plain text"])  # fmt: skip
def test_a_damaged_packed_record_is_refused_by_name(packed, damage):
    path = packed / "points.jsonl.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ResultsError, match=r"points\.jsonl\.gz"):
        read_records(packed)


def test_a_run_killed_before_its_first_line_can_be_resumed_or_started_again(tmp_path):
    for second in (
        lambda: Store.resume(tmp_path, MACHINE),
        lambda: Store.create(tmp_path, MACHINE),
    ):
        Store.create(tmp_path, MACHINE).close()
        (tmp_path / "points.jsonl").unlink()
        store = second()
        store.append_round(CELL, 0, Round([1.0]))
        store.close()
        assert numbers(read_records(tmp_path)) == {"fast": [0]}
        (tmp_path / "points.jsonl").unlink()


def test_paths_that_are_no_results_folder_are_named(tmp_path, folder):
    for read in (read_environment, read_records):
        with pytest.raises(ResultsError, match=r"is not a results folder: it has no"):
            read(tmp_path / "nowhere")
    with pytest.raises(ResultsError, match="is not a results folder"):
        Store.resume(folder / "points.jsonl", MACHINE)  # a file
    (folder / "points.jsonl").unlink()
    (folder / "points.jsonl").mkdir()
    with pytest.raises(ResultsError, match=r"cannot read .*Is a directory"):
        read_records(folder)


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ResultsError, match=f"cannot write results in {path}: "):
            Store.create(path, MACHINE)


def _full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_while_appending_keeps_earlier_lines(folder, monkeypatch):
    store = Store.resume(folder, MACHINE)
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(ResultsError, match=r"cannot write .*points\.jsonl: No space left on"):
        store.append_round(CELL, 3, Round([1.0]))
    assert sorted(store.record(CELL).rounds) == [0, 1, 2]  # not claimed
    store.close()
    assert numbers(read_records(folder))["fast"][:3] == [0, 1, 2]


def test_closing_after_a_failed_write_does_not_fail_again(tmp_path, monkeypatch):
    store = Store.create(tmp_path / "run", MACHINE)
    monkeypatch.setattr(os, "write", _full)
    with pytest.raises(ResultsError, match="No space left on device"):
        store.append_round(CELL, 0, Round([1.0]))
    store.close()
    monkeypatch.undo()
    assert read_records(tmp_path / "run") == []


def test_a_full_disk_at_the_start_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(ResultsError, match="No space left on device"):
        Store.create(tmp_path / "run", MACHINE)
    assert list((tmp_path / "run").iterdir()) == []


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    monkeypatch.setattr(os, "replace", _full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file.txt", "old")]


def test_an_atomic_write_follows_no_link_and_replaces_no_device(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in ("file.txt.tmp", f"file.txt.{os.getpid()}.tmp"):
        (tmp_path / name).symlink_to(victim)
    write_atomically(tmp_path / "file.txt", "new")
    assert victim.read_text() == "precious" and (tmp_path / "file.txt").read_text() == "new"
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "file.txt").stat().st_mode & 0o777 == 0o666 & ~umask
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(tmp_path / "fifo", "new")
    assert (tmp_path / "fifo").is_fifo()


def test_results_folders_are_found_by_points_or_by_csv(tmp_path, folder):
    (tmp_path / "committed").mkdir()
    (tmp_path / "committed" / "results.csv").write_text("")
    (folder / "results.csv").write_text("")
    assert results_folders([tmp_path]) == [tmp_path / "committed", folder]
    assert results_folders([folder, tmp_path / "committed"]) == [folder, tmp_path / "committed"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultsError, match="empty: expected a results folder"):
        results_folders([tmp_path / "empty"])


def test_a_measurement_clears_its_earlier_lack(folder):
    store = Store.resume(folder, MACHINE)
    lines = len((folder / "points.jsonl").read_text().splitlines())
    for _ in range(2):  # said once only
        store.append_lack(CELL, "energy", "no counter")
        store.append_lack(CELL, "greedy", "it failed")
    assert len((folder / "points.jsonl").read_text().splitlines()) == lines + 2
    record = store.record(CELL)
    assert record.lacks == {"energy": "no counter", "greedy": "it failed"}
    assert (record.status, len(record.rounds)) == ("ok", 3)
    store.append_extra(CELL, "energy", Loop(10, 1.0, 5.0, 90.0))
    store.append_form(CELL, "greedy", 0, Round([1.0]))
    store.close()
    assert not store.record(CELL).lacks
    assert read_records(folder) == store.records


def test_a_locked_folder_is_refused_until_its_owner_closes(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lines_of, "PATIENCE", 0.0)
    owner = Store.resume(folder, MACHINE)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(ResultsError, match=f"process {os.getpid()} is writing results there"):
        Store.resume(folder, MACHINE)
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
    owner.close()
    Store.resume(folder, MACHINE).close()
    new = Store.create(tmp_path / "new", MACHINE)
    with pytest.raises(ResultsError, match="is writing results there"):
        Store.create(tmp_path / "new", MACHINE)
    new.close()


def test_the_cell_at_work_is_on_disk_until_the_run_ends(folder):
    store = Store.resume(folder, MACHINE)
    assert store.interrupted is None
    store.begin(OTHER)
    remaining = (folder / "running.json").read_bytes()
    assert json.loads(remaining)["pid"] == os.getpid()
    store.close()
    assert not (folder / "running.json").exists()
    (folder / "running.json").write_bytes(remaining)  # as after a kill
    store = Store.resume(folder, MACHINE)
    store.close()
    assert store.interrupted == OTHER
    (folder / "running.json").write_text("{")
    store = Store.resume(folder, MACHINE)
    store.close()
    assert store.interrupted is None


def test_a_folder_that_was_moved_is_not_in_place(folder):
    store = Store.resume(folder, MACHINE)
    assert store.is_in_place()
    folder.rename(folder.with_name("moved"))
    assert not store.is_in_place()
    store.close()
