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
    """How a problem is measured: docs/reference/results-format.md has the values."""

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
        """Column -> value, in the order of results.csv: those of COLUMNS."""
        own = {name: value for name, value in vars(self).items() if name not in _PARTS}
        return {**own, **vars(self.conditions), **self.problem.fields()}

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Cell:
        """The cell of these columns; those of Problem that have a default may be missing.

        Raises:
            ValueError, TypeError: a column is unknown, missing or of another type, or Problem
                refuses its value.
        """
        given = dict(columns)
        parts = {
            name: typed(
                part, {f: given.pop(column) for column, f in _named(part) if column in given}
            )
            for name, part in _PARTS.items()
        }
        return typed(cls, {**given, **parts})


_PARTS: dict[str, Any] = {"conditions": Conditions, "problem": Problem}


def _named(part: type) -> list[tuple[str, str]]:
    """(column, name of the field) of the fields of a dataclass; columns are lower-case."""
    return [(each.name.lower(), each.name) for each in fields(part) if each.name not in _PARTS]


COLUMNS = tuple(column for part in (Cell, *_PARTS.values()) for column, _ in _named(part))
"""The columns of results.csv that say which cell a row is about."""


def column_types() -> dict[str, Any]:
    """The type of each of COLUMNS."""
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
    def of_line(cls, values: Any) -> Loop:
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
    """Time of the host in an eager call, us, of so many that nobody waited for."""

    call_us: float
    calls: int

    def __post_init__(self) -> None:
        if not (self.call_us > 0 and self.calls > 0):
            raise ValueError(f"host: expected call_us and calls > 0; got {self}")


@dataclass
class CellRecord:
    """All that is known of one cell: its rounds by number, or the reason there are none.

    forms: rounds of FORMS of the sampler, taken in turn with its own. lacks: what else was asked
    for and could not be measured (one of LACKS), and why.
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
        """Add what a line of points.jsonl says: one of a round, what is beside it, or a status.

        line: without `schema`, `cell` and `crc32`.

        A round clears what kept the cell from being measured before; what is measured after all
        is lacking no more.

        Raises:
            ValueError, TypeError, KeyError: it is not such a line.
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
    "energy": Loop.of_line,
    "sustained": Loop.of_line,
    "host": partial(typed, Host),
}
"""Fields of CellRecord that are measured once per cell, with what reads them from a line."""


def _one_of(known: tuple[str, ...], given: Any) -> str:
    if given not in known:
        raise ValueError(f"expected one of {', '.join(known)}; got {given!r:.40}")
    return given


def _number(given: Any) -> int:
    if not fits(given, int) or given < 0:
        raise ValueError(f"round: expected an integer >= 0; got {given!r:.40}")
    return given


def _text(given: Any) -> str:
    if not fits(given, str):
        raise ValueError(f"reason: expected a text; got {given!r:.40}")
    return given
