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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from fsbench.errors import ResultsError
from fsbench.records.disk import append_line, refusals, write_atomically

SCHEMA = 1
"""Version of points.jsonl and env.json; a folder of another version is never resumed."""

STATUSES = (
    "ok",
    "check_failed",
    "unsupported",
    "unavailable",
    "oom",
    "timeout",
    "error",
    "timer_unavailable",
)


@dataclass(frozen=True)
class Cell:
    """provider x problem x way of measuring: what one row of results.csv is about."""

    provider: str
    label: str
    kind: str
    fused: bool
    gpu: str
    device: str
    b: int
    d: int
    v: int
    dtype: str
    tp: int
    temperature: float
    logits: str
    timer: str
    graph: bool
    l2: str
    # Records from before truncated problems do not have these.
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    mixed: bool = False
    # Nor from before penalties these.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    history: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the cell; the label may change without making it another cell."""
        return tuple(value for name, value in asdict(self).items() if name != "label")


@dataclass(frozen=True)
class Round:
    """Samples of one interleaved round of one cell, with the state of the GPU around it.

    span_us is one entry per iteration, last end - first start; busy_us (union of the kernels'
    intervals) and sum_us (their sum) are empty for timers that do not see kernels; kernels maps a
    kernel's name to its mean time per iteration. peak_extra_bytes is memory beyond the weight and
    hidden that the sampler held or touched in a step. first_call_s is the wall time of building the
    sampler and calling it once, and warm names what was not cold then (fsbench.machine.caches).
    """

    span_us: list[float]
    busy_us: list[float] = field(default_factory=list)
    sum_us: list[float] = field(default_factory=list)
    n_kernels: int | None = None
    kernels: dict[str, float] = field(default_factory=dict)
    clocks: dict[str, Any] = field(default_factory=dict)
    config: str = ""
    peak_extra_bytes: int | None = None
    first_call_s: float | None = None
    warm: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Energy:
    """What a loop of steps took: joules, seconds and steps, and the GPU's power when idle, W."""

    joules: float
    seconds: float
    steps: int
    idle_w: float


FORMS = ("matmul", "greedy")
"""A sampler with less in it: its matmul alone; the same kernel without noise."""


@dataclass
class CellRecord:
    """All that is known of one cell: its rounds by number, or the reason there are none.

    forms: rounds of FORMS of the sampler, taken in turn with its own. lacks: what else was asked
    for and could not be measured ("energy", or a form), and why.
    """

    cell: Cell
    rounds: dict[int, Round] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    forms: dict[str, dict[int, Round]] = field(default_factory=dict)
    energy: Energy | None = None
    lacks: dict[str, str] = field(default_factory=dict)

    def add_round(self, number: int, measured: Round) -> None:
        """Add a measured round. What kept the cell from being measured before is then history."""
        self.rounds[number] = measured
        self.status, self.reason = "ok", ""

    def add_form(self, form: str, number: int, measured: Round) -> None:
        """Add a round of one of FORMS."""
        self.forms.setdefault(form, {})[number] = measured
        self.lacks.pop(form, None)

    def add_energy(self, energy: Energy) -> None:
        """Add the energy, which replaces an earlier one."""
        self.energy = energy
        self.lacks.pop("energy", None)


class Store:
    """The points.jsonl of one results folder, open for appending.

    `Store.create` starts a folder, `Store.resume` continues one. Both raise ResultsError with the
    path and the reason; nothing is left half-written.
    """

    def __init__(self, folder: Path, records: dict[tuple[object, ...], CellRecord]):
        self.folder = folder
        self._records = records
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
        return cls(folder, {})

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
        return cls(folder, {record.cell.key: record for record in records})

    @classmethod
    def reopen(cls, folder: Path) -> Store:
        """Go on with a folder of this very run, from another process of it."""
        return cls(folder, {record.cell.key: record for record in read_records(folder)})

    @classmethod
    def replica(cls, folder: Path) -> Store:
        """For the other ranks of a run: knows what the folder holds and is told, writes nothing."""
        store = cls.__new__(cls)
        store.folder = folder
        store._file = None
        store._records = {record.cell.key: record for record in read_records(folder)}
        return store

    def record(self, cell: Cell) -> CellRecord:
        """What is already known of a cell (an empty record if nothing)."""
        return self._records.get(cell.key) or CellRecord(cell)

    def append_round(self, cell: Cell, number: int, measured: Round) -> None:
        """Add one measured round, on disk before this returns."""
        self._append({"cell": asdict(cell), "round": number, "measured": asdict(measured)})
        self._known(cell).add_round(number, measured)

    def append_form(self, cell: Cell, form: str, number: int, measured: Round) -> None:
        """As append_round, of one of FORMS of the cell's sampler."""
        assert form in FORMS, form
        line = {"form": form, "round": number, "measured": asdict(measured)}
        self._append({"cell": asdict(cell), **line})
        self._known(cell).add_form(form, number, measured)

    def append_energy(self, cell: Cell, energy: Energy) -> None:
        """Add the energy of a cell, on disk before this returns."""
        self._append({"cell": asdict(cell), "energy": asdict(energy)})
        self._known(cell).add_energy(energy)

    def append_lack(self, cell: Cell, what: str, reason: str) -> None:
        """Record why a form or the energy of a cell is missing; nothing if it says so already."""
        lacks = self._known(cell).lacks
        if lacks.get(what) != reason:
            self._append({"cell": asdict(cell), "lacks": what, "reason": reason})
            lacks[what] = reason

    def append_status(self, cell: Cell, status: str, reason: str) -> None:
        """Record why a cell has no (more) samples; does nothing if that is what it says already."""
        assert status in STATUSES, status
        record = self._known(cell)
        if (record.status, record.reason) != (status, reason):
            self._append({"cell": asdict(cell), "status": status, "reason": reason})
            record.status, record.reason = status, reason

    def _known(self, cell: Cell) -> CellRecord:
        return self._records.setdefault(cell.key, CellRecord(cell))

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        with refusals("write results in", self.folder):
            append_line(self._file, {"schema": SCHEMA, **line})

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
    records: dict[tuple[object, ...], CellRecord] = {}
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text)
            if line["schema"] != SCHEMA:
                raise ResultsError(
                    f"{path}:{number}: expected schema {SCHEMA}; got {line['schema']!r}"
                )
            cell = Cell(**line["cell"])
            _add_line(records.setdefault(cell.key, CellRecord(cell)), line)
        except (ValueError, KeyError, TypeError) as error:
            raise ResultsError(f"{path}:{number}: not a results line ({error})") from error
    return list(records.values())


def _add_line(record: CellRecord, line: dict[str, Any]) -> None:
    """Put what a line says about a cell into its record."""
    if "form" in line:
        record.add_form(line["form"], line["round"], Round(**line["measured"]))
    elif "round" in line:
        record.add_round(line["round"], Round(**line["measured"]))
    elif "energy" in line:
        record.add_energy(Energy(**line["energy"]))
    elif "lacks" in line:
        record.lacks[line["lacks"]] = line["reason"]
    elif line["status"] in STATUSES:
        record.status, record.reason = line["status"], line["reason"]
    else:
        raise ValueError(f"unknown status {line['status']!r}")


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
