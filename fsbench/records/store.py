"""Results of a run: an append-only file of raw samples, and the table derived from it.

A results folder holds

    points.jsonl   the truth: one line per measured round of a cell, or per cell that was not timed
    env.json       what it was measured on (fsbench.machine.environment)
    results.csv    one row per cell, derived from points.jsonl

Each line is flushed to disk before the next measurement starts, so a run killed at any instant
loses at most the round in flight. docs/results-format.md describes every column.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from fsbench.errors import ResultsError
from fsbench.records.cell import FORMS, STATUSES, Cell, CellRecord, Energy, Round
from fsbench.records.disk import append_line, refusals, write_atomically

SCHEMA = 1
"""Version of points.jsonl and env.json; a folder of another version is never resumed."""


class Store:
    """The points.jsonl of one results folder, open for appending.

    `Store.create` starts a folder, `Store.resume` continues one. Both raise ResultsError with the
    path and the reason; nothing is left half-written.
    """

    def __init__(self, folder: Path, records: Iterable[CellRecord] = ()):
        self.folder = folder
        self._records = {record.cell: record for record in records}
        with refusals("write results in", folder):
            self._file: TextIO | None = open(  # noqa: SIM115
                folder / "points.jsonl", "a", encoding="utf-8"
            )

    @classmethod
    def create(cls, folder: Path, environment: dict[str, Any]) -> Store:
        """Start an empty results folder and write its environment record."""
        with refusals("write results in", folder):
            if any((folder / name).exists() for name in ("points.jsonl", "results.csv")):
                raise ResultsError(
                    f"{folder} already holds results; use --resume {folder} or another --out"
                )
            folder.mkdir(parents=True, exist_ok=True)
        _write_environment(folder, environment)
        return cls(folder)

    @classmethod
    def resume(cls, folder: Path, environment: dict[str, Any]) -> Store:
        """Continue a folder measured with this schema on this kind of machine.

        The environment is added to env.json under `resumed`: versions may have changed since.
        """
        before = read_environment(folder)
        for name in ("gpu", "device", "cpu"):
            if before.get(name) != environment.get(name):
                raise ResultsError(
                    f"{folder} was measured on another machine: expected {name} "
                    f"{environment.get(name)!r}; got {before.get(name)!r}"
                )
        points = folder / "points.jsonl"
        with refusals("write results in", folder):
            points.touch()  # a run killed before its first measurement has none
        records = read_records(folder)
        _drop_cut_line(points)
        _write_environment(folder, {**before, "resumed": [*before.get("resumed", []), environment]})
        return cls(folder, records)

    @classmethod
    def reopen(cls, folder: Path) -> Store:
        """Go on with a folder of this very run, from another process of it."""
        return cls(folder, read_records(folder))

    @classmethod
    def replica(cls, folder: Path) -> Store:
        """For the other ranks of a run: knows what the folder holds and is told, writes nothing."""
        store = cls.__new__(cls)
        store.folder = folder
        store._file = None
        store._records = {record.cell: record for record in read_records(folder)}
        return store

    def record(self, cell: Cell) -> CellRecord:
        """What is already known of a cell (an empty record if nothing)."""
        return self._records.get(cell) or CellRecord(cell)

    def append_round(self, cell: Cell, number: int, measured: Round) -> None:
        """Add one measured round, on disk before this returns."""
        self._append(cell, {"round": number, "measured": asdict(measured)})

    def append_form(self, cell: Cell, form: str, number: int, measured: Round) -> None:
        """As append_round, of one of FORMS of the cell's sampler."""
        assert form in FORMS, form
        self._append(cell, {"form": form, "round": number, "measured": asdict(measured)})

    def append_energy(self, cell: Cell, energy: Energy) -> None:
        """Add the energy of a cell, on disk before this returns."""
        self._append(cell, {"energy": asdict(energy)})

    def append_lack(self, cell: Cell, what: str, reason: str) -> None:
        """Record why a form or the energy of a cell is missing; nothing if it says so already."""
        if self.record(cell).lacks.get(what) != reason:
            self._append(cell, {"lacks": what, "reason": reason})

    def append_status(self, cell: Cell, status: str, reason: str) -> None:
        """Record why a cell has no (more) samples; does nothing if that is what it says already."""
        assert status in STATUSES, status
        record = self._records.setdefault(cell, CellRecord(cell))
        if (record.status, record.reason) != (status, reason):
            self._append(cell, {"status": status, "reason": reason})

    def _append(self, cell: Cell, line: dict[str, Any]) -> None:
        if self._file is not None:
            with refusals("write results in", self.folder):
                append_line(self._file, {"schema": SCHEMA, "cell": cell.columns(), **line})
        self._records.setdefault(cell, CellRecord(cell)).add(line)

    @property
    def records(self) -> list[CellRecord]:
        """Every cell so far, in the order first met."""
        return list(self._records.values())

    def close(self) -> None:
        """Close the file; the folder stays readable and resumable."""
        # Only a line whose append has already raised can still be in the buffer.
        with suppress(OSError):
            if self._file is not None:
                self._file.close()


def read_environment(folder: Path) -> dict[str, Any]:
    """The environment record of a results folder."""
    path = folder / "env.json"
    try:
        environment = json.loads(_read(path))
        schema = environment.get("schema")
    except (ValueError, AttributeError) as error:
        raise ResultsError(f"{path}: not an environment record ({error})") from error
    if schema != SCHEMA:
        raise ResultsError(f"{path}: expected schema {SCHEMA}; got {schema!r}")
    return environment


def _write_environment(folder: Path, environment: dict[str, Any]) -> None:
    text = json.dumps({"schema": SCHEMA, **environment}, indent=2) + "\n"
    with refusals("write results in", folder):
        write_atomically(folder / "env.json", text)


def read_records(folder: Path) -> list[CellRecord]:
    """Every cell of a results folder. A last line cut by a crash is ignored; any other raises."""
    path = folder / "points.jsonl"
    lines = _read(path).split(b"\n")
    lines.pop()  # what follows the last newline: empty, or the line a crash cut short
    records: dict[Cell, CellRecord] = {}
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if line["schema"] != SCHEMA:
                raise ResultsError(
                    f"{path}:{number}: expected schema {SCHEMA}; got {line['schema']!r}"
                )
            cell = Cell.of(line["cell"])
            records.setdefault(cell, CellRecord(cell)).add(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path}:{number}: not a results line ({error})") from error
    return list(records.values())


def _drop_cut_line(path: Path) -> None:
    """Truncate a file to its last complete line, so that appending cannot corrupt it."""
    with refusals("write results in", path.parent), open(path, "r+b") as file:
        file.truncate(file.read().rfind(b"\n") + 1)


def _read(path: Path) -> bytes:
    with refusals("read", path):
        if not path.exists():
            raise ResultsError(f"{path.parent} is not a results folder: it has no {path.name}")
        return path.read_bytes()


def results_folders(paths: Iterable[Path]) -> list[Path]:
    """The results folders at or below each path; a path without any raises ResultsError."""
    found: list[Path] = []
    for path in paths:
        names = ("points.jsonl", "results.csv")
        below = sorted({file.parent for name in names for file in Path(path).rglob(name)})
        if not below:
            raise ResultsError(f"{path}: expected a results folder (points.jsonl or results.csv)")
        found += below
    return found
