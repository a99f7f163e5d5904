"""A cell, the unit of work and a row of results.csv; what is measured of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, get_type_hints

from fsbench.problem import Problem
from fsbench.records.typed import fits, typed

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

FORMS = ("matmul", "greedy")
"""Ablations of a fused sampler: its matmul alone; the same kernel without noise."""

LACKS = ("energy", "sustained", "host", *FORMS)
"""Optional measurements that a cell may lack."""


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measurement: docs/reference/results-format.md has the values."""

    gpu: str
    timer: str
    graph: bool
    l2: str


@dataclass(frozen=True)
class Cell:
    """One sampler on one problem under one set of conditions.

    Its identity is all but the label, which may change.
    """

    provider: str
    label: str = field(compare=False)
    kind: str
    fused: bool
    conditions: Conditions
    problem: Problem

    def columns(self) -> dict[str, Any]:
        """Return the values of COLUMNS by column, in the order of results.csv."""
        identity = {name: value for name, value in vars(self).items() if name not in _PARTS}
        return {**identity, **vars(self.conditions), **self.problem.fields()}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Cell:
        """Return the cell of these columns; columns of Problem with a default may be missing.

        Raises:
            ValueError, TypeError: a column is unknown, missing or of another type, or Problem
                refuses its value.
        """
        values = dict(columns)
        parts = {
            name: typed(
                part, {f: values.pop(column) for column, f in _named(part) if column in values}
            )
            for name, part in _PARTS.items()
        }
        return typed(cls, {**values, **parts})


_PARTS: dict[str, Any] = {"conditions": Conditions, "problem": Problem}


def _named(part: type) -> list[tuple[str, str]]:
    """Return (column, name of the field) of a dataclass's fields; columns are lower-case."""
    return [(each.name.lower(), each.name) for each in fields(part) if each.name not in _PARTS]


COLUMNS = tuple(column for part in (Cell, *_PARTS.values()) for column, _ in _named(part))
"""The columns of results.csv that say which cell a row is about."""


def column_types() -> dict[str, Any]:
    """Return the type of each of COLUMNS."""
    parts = (Cell, *_PARTS.values())
    return {c: get_type_hints(part)[name] for part in parts for c, name in _named(part)}


@dataclass(frozen=True)
class Round:
    """Samples of one interleaved round of one cell, with the state of the GPU around it.

    span_us is one entry per iteration, last end - first start; busy_us (union of the kernels'
    intervals) and sum_us (their sum) are empty for timers that do not see kernels; kernels maps a
    kernel's name to its mean time per iteration. peak_extra_bytes is memory beyond the weight and
    hidden that the sampler held or touched in a step. first_call_s is the wall time of building the
    sampler and calling it once, and warm names what was not cold then (fsbench.machine.caches).
    ahead_s is the same of a process that did both before, to compile; None if none did.
    turn is how many samplers come before it in its round; None in records before there were turns.
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
    ahead_s: float | None = None
    turn: int | None = None

    def __post_init__(self) -> None:
        if not self.span_us or min(self.span_us) < 0:
            raise ValueError(f"span_us: expected times >= 0; got {self.span_us!r:.40}")
        for name in ("busy_us", "sum_us"):
            if getattr(self, name) and len(getattr(self, name)) != len(self.span_us):
                raise ValueError(f"{name}: expected as many as span_us")
        for name, value in self.clocks.items():
            if not fits(value, list[str] if name == "throttle" else float | None):
                raise TypeError(f"clocks: {name}: got {value!r:.40}")


@dataclass(frozen=True)
class Loop:
    """Back-to-back steps: how many, their seconds, joules (None if unknown), idle power in W."""

    steps: int
    seconds: float
    joules: float | None = None
    idle_w: float | None = None

    def __post_init__(self) -> None:
        if not (self.seconds > 0 and self.steps > 0):
            raise ValueError(f"loop: expected seconds and steps > 0; got {self}")

    @classmethod
    def from_line(cls, values: Any) -> Loop:
        """Return the loop of a line; older records have the time and energy of one step."""
        if isinstance(values, Mapping) and "step_us" in values:
            step = typed(_Step, values)
            joules = None if step.step_joules is None else step.step_joules * step.steps
            return cls(step.steps, step.step_us * step.steps / 1e6, joules)
        return typed(cls, values)


@dataclass(frozen=True)
class _Step:
    step_us: float
    steps: int
    step_joules: float | None = None


@dataclass(frozen=True)
class Host:
    """Host time of an eager call that is not waited for, us, over this many calls."""

    call_us: float
    calls: int

    def __post_init__(self) -> None:
        if not (self.call_us > 0 and self.calls > 0):
            raise ValueError(f"host: expected call_us and calls > 0; got {self}")


@dataclass
class CellRecord:
    """Measurements of one cell: its rounds by number, or the reason for their absence.

    forms: rounds of FORMS of the sampler, interleaved with `rounds`.
    lacks: reasons for the absence of requested measurements (LACKS).
    """

    cell: Cell
    rounds: dict[int, Round] = field(default_factory=dict)
    status: str = "ok"
    reason: str = ""
    forms: dict[str, dict[int, Round]] = field(default_factory=dict)
    energy: Loop | None = None
    sustained: Loop | None = None
    host: Host | None = None
    lacks: dict[str, str] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line of points.jsonl: a round, one of EXTRAS or LACKS, or a status.

        A round clears an earlier status; a measurement clears its earlier reason for absence.

        Args:
            line: without `schema`, `cell` and checksum.

        Raises:
            ValueError, TypeError, KeyError: the line is damaged.
        """
        names = set(line)
        if names == {"round", "measured"}:
            self.rounds[_number(line["round"])] = typed(Round, line["measured"])
            self.status, self.reason = "ok", ""
        elif names == {"form", "round", "measured"}:
            form = _one_of(FORMS, line["form"])
            rounds = self.forms.setdefault(form, {})
            rounds[_number(line["round"])] = typed(Round, line["measured"])
            self.lacks.pop(form, None)
        elif len(names) == 1 and (name := names.pop()) in EXTRAS:
            setattr(self, name, EXTRAS[name](line[name]))
            self.lacks.pop(name, None)
        elif names == {"lacks", "reason"}:
            self.lacks[_one_of(LACKS, line["lacks"])] = _text(line["reason"])
        elif names == {"status", "reason"}:
            self.status, self.reason = _one_of(STATUSES, line["status"]), _text(line["reason"])
        else:
            raise ValueError(f"unknown fields: {', '.join(map(repr, sorted(names)))}")


EXTRAS: dict[str, Callable[[Any], Any]] = {
    "energy": Loop.from_line,
    "sustained": Loop.from_line,
    "host": partial(typed, Host),
}
"""Fields of CellRecord that are measured once per cell, with what reads them from a line."""


def _one_of(names: tuple[str, ...], value: Any) -> str:
    if value not in names:
        raise ValueError(f"expected one of {', '.join(names)}; got {value!r:.40}")
    return value


def _number(value: Any) -> int:
    if not fits(value, int) or value < 0:
        raise ValueError(f"round: expected an integer >= 0; got {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if not fits(value, str):
        raise ValueError(f"reason: expected a text; got {value!r:.40}")
    return value
