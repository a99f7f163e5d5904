"""Results of a run: an append-only file of raw samples, and the table derived from it.

A results folder holds

    points.jsonl   the truth: one line per measured round of a cell, or per cell that was not timed
                   (fsbench.records.lines); committed records have points.jsonl.gz instead
    env.json       what it was measured on (fsbench.machine.environment)
    results.csv    one row per cell, derived from points.jsonl
    running.json   while a run writes into it: which process, and the cell it is at

A run that is killed at any instant loses at most the round in flight. Commands that read a folder
derive its rows from points.jsonl, whatever results.csv says. docs/reference/results-format.md
describes every column.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsbench.errors import ResultsError
from fsbench.records.cell import (
    EXTRAS,
    FORMS,
    STATUSES,
    Cell,
    CellRecord,
    Host,
    Loop,
    Round,
)
from fsbench.records.disk import read_file, refusals, write_into
from fsbench.records.iomodel import gpu_slug
from fsbench.records.lines import Lines, LockedFile, read_lines
from fsbench.records.typed import fits

SCHEMA = 1
"""Version of points.jsonl and env.json; a folder of another version is never resumed."""

ENVIRONMENT = "env.json"
POINTS = "points.jsonl"
PACKED = f"{POINTS}.gz"
RUNNING = "running.json"
TABLE = "results.csv"


class Store:
    """Records of the cells of a run, and the points.jsonl that they are appended to.

    `Store.create` starts a folder, `Store.resume` continues one, `Store.replica` belongs to a
    process that measures for another one. The first two hold the folder's lock until they are
    closed or the process ends. They raise ResultsError with the path and the reason, and leave
    nothing half-written.

    interrupted: the cell at work when the last run was killed.
    """

    def __init__(self, folder: Path, write: Callable[[Cell, dict[str, Any]], None]):
        self.folder = folder
        self.interrupted: Cell | None = None
        self.times: list[dict[str, Any]] = []
        self._records: dict[Cell, CellRecord] = {}
        self._write = write
        self._points: Lines | None = None
        self._environment: dict[str, Any] | None = None

    @classmethod
    def create(cls, folder: Path, environment: dict[str, Any]) -> Store:
        """Start an empty results folder and write its environment record."""
        require_empty(folder)
        with refusals("write results in", folder):
            folder.mkdir(parents=True, exist_ok=True)
        store = cls._locked(folder)
        try:
            require_empty(folder)  # still: another process may have been faster
            write_environment(folder, environment)
            store.begin(None)
        except BaseException:
            store.close()
            with suppress(OSError):
                if not (folder / POINTS).stat().st_size:
                    (folder / POINTS).unlink()
            raise
        return store

    @classmethod
    def resume(cls, folder: Path, environment: dict[str, Any]) -> Store:
        """Continue a folder measured with this schema on this kind of machine.

        The environment is added to env.json under `resumed`, since versions may have changed, when
        the first line is appended. Nothing is written before.
        """
        resumed = resumed_environment(folder, environment)
        refuse_packed(folder, POINTS)
        store = cls._locked(folder)
        try:
            store.replace_records(read_records(folder))
            _, store.interrupted = _running(folder)
            store.begin(None)
        except BaseException:
            store.close()
            raise
        store._environment = resumed
        return store

    @classmethod
    def _locked(cls, folder: Path) -> Store:
        """A store that holds the lock of its folder, which is one of points.jsonl."""
        try:
            points = Lines.open(folder / POINTS)
        except LockedFile as error:
            owner, _ = _running(folder)
            raise ResultsError(
                f"{folder}: process {owner or '(unknown)'} is writing results there; expected "
                "a folder that no run is writing to"
            ) from error
        store = cls(folder, lambda cell, line: None)
        store._write, store._points = store._to_disk, points
        return store

    @classmethod
    def replica(
        cls, write: Callable[[Cell, dict[str, Any]], None] = lambda cell, line: None
    ) -> Store:
        """Return a store whose lines go to `write` and not to disk."""
        return cls(Path(), write)

    def replace_records(self, records: Iterable[CellRecord]) -> None:
        """Replace all records by those of another process."""
        self._records = {record.cell: record for record in records}

    def begin(self, cell: Cell | None) -> None:
        """Write to disk that this process is at work on a cell."""
        if self._points is not None:
            self._points.require_in_place()
            text = json.dumps({"pid": os.getpid(), "cell": cell.columns() if cell else None})
            write_into(self.folder, {RUNNING: text})

    def record(self, cell: Cell) -> CellRecord:
        """Return the record of a cell, an empty one if it is new."""
        return self._records.get(cell) or CellRecord(cell)

    def append_round(self, cell: Cell, number: int, measured: Round) -> None:
        """Add a measured round; it is on disk before this returns."""
        self.append(cell, {"round": number, "measured": asdict(measured)})

    def append_form(self, cell: Cell, form: str, number: int, measured: Round) -> None:
        """Add a measured round of one of FORMS of the cell's sampler."""
        assert form in FORMS, form
        self.append(cell, {"form": form, "round": number, "measured": asdict(measured)})

    def append_extra(self, cell: Cell, name: str, measured: Loop | Host) -> None:
        """Add one of EXTRAS of a cell; it is on disk before this returns."""
        assert name in EXTRAS, name
        self.append(cell, {name: asdict(measured)})

    def append_lack(self, cell: Cell, name: str, reason: str) -> None:
        """Record why a cell lacks one of LACKS, unless that is recorded already."""
        if self.record(cell).lacks.get(name) != reason:
            self.append(cell, {"lacks": name, "reason": reason})

    def append_status(self, cell: Cell, status: str, reason: str) -> None:
        """Record why a cell has no (more) samples, unless that is recorded already."""
        assert status in STATUSES, status
        record = self._records.setdefault(cell, CellRecord(cell))
        if (record.status, record.reason) != (status, reason):
            self.append(cell, {"status": status, "reason": reason})

    def note_time(self, spent: dict[str, Any]) -> None:
        """Add to env.json the seconds per phase of a process, if it has appended a line.

        env.json then has the number of lines, too: readers notice a missing last line.
        """
        if self._environment is None and self._points is not None:
            self._points.require_in_place()
            facts = read_environment(self.folder)
            self.times = [*facts.get("times", []), spent]
            lines = self._points.count
            write_environment(self.folder, {**facts, "times": self.times, "lines": lines})

    def append(self, cell: Cell, line: dict[str, Any]) -> None:
        """Add a line to a cell (CellRecord.add); it is on disk before this returns."""
        self._write(cell, line)
        self._records.setdefault(cell, CellRecord(cell)).add(line)

    def _to_disk(self, cell: Cell, line: dict[str, Any]) -> None:
        assert self._points is not None, "the store is closed"
        if self._environment is not None:
            self._points.require_in_place()
            write_environment(self.folder, self._environment)
            self._environment = None
        self._points.append({"schema": SCHEMA, "cell": cell.columns(), **line})

    @property
    def records(self) -> list[CellRecord]:
        """Return the record of every cell so far, in the order they were first met."""
        return list(self._records.values())

    def is_in_place(self) -> bool:
        """Return whether the folder can be resumed: nothing else moved or changed it."""
        with suppress(ResultsError):
            if self._points is not None:
                self._points.require_in_place()
                return (self.folder / ENVIRONMENT).exists()
        return False

    def close(self) -> None:
        """Close the file and release the lock; the folder can be read and resumed."""
        if self._points is not None:
            with suppress(OSError, ResultsError):
                self._points.require_in_place()
                (self.folder / RUNNING).unlink(missing_ok=True)
            self._points.close()
        self._points = None


def _running(folder: Path) -> tuple[int | None, Cell | None]:
    """Return (process, cell at work) of a run that writes into a folder or was killed."""
    try:
        facts = json.loads(read_file(folder / RUNNING))
        return facts["pid"], Cell.from_columns(facts["cell"]) if facts["cell"] else None
    except (OSError, ValueError, TypeError, KeyError):  # absent or damaged: no loss
        return None, None


def require_empty(folder: Path) -> None:
    """Raise ResultsError if a folder holds results or cannot be used; ignore empty files."""
    points, table = folder / POINTS, folder / TABLE
    with refusals("write results in", folder):
        if (
            table.exists()
            or (folder / PACKED).exists()
            or (points.exists() and points.stat().st_size)
        ):
            raise ResultsError(
                f"{folder} already holds results; use --resume {folder} or another --out"
            )


_FACTS: dict[str, Any] = {
    **dict.fromkeys(("utc", "fsbench", "git_sha", "device", "gpu", "cpu"), str | None),
    "git_dirty": bool | None,
    "options": dict[str, Any],
    "resumed": list[dict[str, Any]],
    "times": list[dict[str, Any]],
    "lines": int,
}
"""Types of optional fields of env.json that are read."""


def read_environment(folder: Path) -> dict[str, Any]:
    """Return the environment record of a results folder."""
    path = folder / ENVIRONMENT
    _require_file(path)
    with refusals("read", path):
        text = read_file(path)
    try:
        environment = json.loads(text)
        schema = environment.get("schema")
    except (ValueError, AttributeError, RecursionError, MemoryError) as error:
        raise ResultsError(f"{path}: not an environment record ({error})") from error
    if schema != SCHEMA:
        raise ResultsError(f"{path}: expected schema {SCHEMA}; got {schema!r}")
    for name, hint in _FACTS.items():
        if name in environment and not fits(environment[name], hint):
            raise ResultsError(f"{path}: {name}: expected {hint}; got {environment[name]!r:.60}")
    return environment


def resumed_environment(folder: Path, environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment record of a folder that is continued in another environment.

    Raises:
        ResultsError: the folder has no record, or was measured on another kind of machine.
    """
    before = read_environment(folder)
    for name in ("gpu", "device", "cpu"):
        if before.get(name) != environment.get(name):
            raise ResultsError(
                f"{folder} was measured on another machine: expected {name} "
                f"{environment.get(name)!r}; got {before.get(name)!r}"
            )
    return {**before, "resumed": [*before.get("resumed", []), dict(environment)]}


def write_environment(folder: Path, environment: Mapping[str, Any]) -> None:
    """Write env.json of a results folder; make the folder if it does not exist."""
    text = json.dumps({"schema": SCHEMA, **environment}, indent=2) + "\n"
    write_into(folder, {ENVIRONMENT: text})


def points_file(folder: Path) -> Path:
    """Return the path of a folder's samples: points.jsonl, or points.jsonl.gz without one."""
    return perhaps_packed(folder, POINTS)


def perhaps_packed(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder, or that of NAME.gz if only that exists."""
    packed = f"{name}.gz"
    with refusals("read", folder):
        only_packed = (folder / packed).exists() and not (folder / name).exists()
    return folder / (packed if only_packed else name)


def refuse_packed(folder: Path, name: str) -> None:
    """Raise ResultsError if only NAME.gz exists: no line can be appended to it."""
    path = perhaps_packed(folder, name)
    if path.name != name:
        raise ResultsError(f"{path}: expected {name}; unpack it by gunzip first")


def read_records(folder: Path) -> list[CellRecord]:
    """Return the record of every cell of a folder; ignore a last line that was cut short.

    Raises:
        ResultsError: a line is damaged, recorded twice, or missing.
    """
    path = points_file(folder)
    _require_file(path)
    records: dict[Cell, CellRecord] = {}
    seen: set[tuple[Any, ...]] = set()
    number = 0
    for each in read_lines(path):
        number, line = each.number, each.value
        try:
            if (schema := line.pop("schema")) != SCHEMA:
                raise ResultsError(f"{path}:{number}: expected schema {SCHEMA}; got {schema!r:.40}")
            cell = Cell.from_columns(line.pop("cell"))
            round_ = (cell, line.get("form"), line.get("round"))
            if "round" in line and round_ in seen:
                raise ValueError("an earlier line has the same round of the same cell")
            seen.add(round_)
            records.setdefault(cell, CellRecord(cell)).add(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ResultsError(f"{path}:{number}: not a results line ({error})") from error
    if (folder / ENVIRONMENT).exists():
        expected = read_environment(folder).get("lines", 0)
        if number < expected:
            raise ResultsError(f"{path}: expected {expected} lines, as env.json says; got {number}")
    return list(records.values())


def _require_file(path: Path) -> None:
    with refusals("read", path):
        if not path.exists():
            raise ResultsError(f"{path.parent} is not a results folder: it has no {path.name}")


def shipped_results() -> Path:
    """Return the folder of the records that come with fsbench; in a checkout it is results/."""
    return Path(__file__).parents[1] / "results"


def results_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the results folders at or below each path; raise ResultsError without any."""
    folders: list[Path] = []
    for path in paths:
        below = folders_below(path)
        if not below:
            raise ResultsError(f"{path}: expected a results folder (points.jsonl or results.csv)")
        folders += below
    return folders


def folders_below(path: Path) -> list[Path]:
    """Return the results folders at or below a path."""
    names = (POINTS, PACKED, TABLE)
    return sorted({file.parent for name in names for file in Path(path).rglob(name)})


def new_folder(facts: dict[str, Any], suffix: str) -> Path:
    """Make and return results/<gpu>/<utc>-<commit>, with "-<suffix>" if there is one.

    Runs that begin within a second have folders that end in -2, -3 and so on.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    commit = (facts["git_sha"] or "nogit")[:7]
    first = "-".join(filter(None, (stamp, commit, suffix)))
    number, name = 1, first
    while True:
        folder = Path("results") / (gpu_slug(facts["gpu"]) or "cpu") / name
        with refusals("write results in", folder), suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        number += 1
        name = f"{first}-{number}"
