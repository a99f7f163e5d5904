"""results.csv: one row per cell, derived from the raw samples."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fsbench.errors import ResultsError, one_line
from fsbench.provider import Kind
from fsbench.records import breakdown, iomodel
from fsbench.records.cell import COLUMNS as CELL_COLUMNS
from fsbench.records.cell import STATUSES, CellRecord, Round, column_types
from fsbench.records.disk import read_file, write_into
from fsbench.records.sheet import as_csv
from fsbench.records.stats import median_interval

_INTEGERS = ("n_kernels", "n_samples", "peak_extra_bytes")
_TEXTS = ("throttle", "config", "split_by", "warm", "lacks")
_FIGURES = (
    *("median_us", "ci_lo_us", "ci_hi_us", "min_us", "p10_us", "p90_us", "p99_us"),
    *("busy_us", "sum_us", "n_kernels", "n_samples", "gb_per_s", "tflops", "roofline_pct"),
    *("sm_mhz", "sm_mhz_timed", "mem_mhz", "power_w", "throttle", "peak_extra_bytes", "config"),
    *("matmul_us", "sampling_us", "other_us", "split_by", "j_per_token", "energy_w", "idle_w"),
    *("sustained_us", "sustained_joules", "sustained_w", "host_us"),
    *("first_call_s", "warm", "ahead_s", "lacks"),
)
"""Columns that are derived from a cell's samples."""

COLUMNS = (*CELL_COLUMNS, "status", "reason", *_FIGURES)
"""Columns of results.csv, in order."""

_TYPES: dict[str, Any] = {
    **column_types(),
    **dict.fromkeys(_FIGURES, float),
    **dict.fromkeys(("status", "reason", *_TEXTS), str),
}
_REQUIRED = (
    *("provider", "label", "kind", "fused", "gpu", "timer", "graph", "l2", "device"),
    *("b", "d", "v", "dtype", "status", "median_us", "ci_lo_us", "ci_hi_us"),
)
"""Columns that a results.csv must have; older versions had not measured the others."""

_NAMES = {"kind": tuple(Kind), "status": STATUSES}


def row(record: CellRecord) -> dict[str, Any]:
    """Return the row of one cell: COLUMNS and their values."""
    values = {"status": record.status, "reason": record.reason, **_figures(record)}
    return {**record.cell.columns(), **dict.fromkeys(_FIGURES), **values}


def _figures(record: CellRecord) -> dict[str, Any]:
    """Derive _FIGURES, as far as they were measured, from the samples of a cell."""
    rounds = [record.rounds[number] for number in sorted(record.rounds)]
    if not rounds:
        return {}
    samples = {
        name: np.concatenate([getattr(each, name) for each in rounds])
        for name in ("span_us", "busy_us", "sum_us")
    }
    span, first, last = samples.pop("span_us"), rounds[0], rounds[-1]
    median = float(np.median(span))
    low, high = median_interval(span.tolist())
    problem, energy, sustained = record.cell.problem, record.energy, record.sustained
    figures = {
        **{"median_us": median, "ci_lo_us": low, "ci_hi_us": high, "min_us": float(span.min())},
        **{f"p{level}_us": float(np.percentile(span, level)) for level in (10, 90, 99)},
        **{name: float(np.median(times)) for name, times in samples.items() if len(times)},
        **{
            name: _median_of(rounds, name)
            for name in ("sm_mhz", "sm_mhz_timed", "mem_mhz", "power_w")
        },
        **{name: getattr(last, name) for name in ("n_kernels", "peak_extra_bytes", "config")},
        "n_samples": len(span),
        "throttle": "|".join(sorted({t for r in rounds for t in r.clocks.get("throttle", [])})),
        "first_call_s": first.first_call_s,
        "warm": "|".join(first.warm),
        "ahead_s": first.ahead_s,
        "lacks": "; ".join(f"{name}: {reason}" for name, reason in record.lacks.items()),
    }
    if median:
        work = iomodel.traffic(problem)
        floor = iomodel.floor_us(problem, record.cell.conditions.gpu)
        figures |= {
            "gb_per_s": work.fused_bytes / median / 1e3,
            "tflops": work.flops / median / 1e6,
        }
        figures["roofline_pct"] = 100 * floor / median if floor else None
    if split := breakdown.split(record):
        parts = asdict(split)
        figures |= {"split_by": parts.pop("method"), **parts}
    if energy and energy.joules is not None:
        figures["j_per_token"] = energy.joules / energy.steps / problem.B
        figures |= {"energy_w": energy.joules / energy.seconds, "idle_w": energy.idle_w}
    if sustained:
        figures["sustained_us"] = sustained.seconds / sustained.steps * 1e6
        if sustained.joules is not None:
            figures["sustained_joules"] = sustained.joules / sustained.steps
            figures["sustained_w"] = sustained.joules / sustained.seconds
    if record.host:
        figures["host_us"] = record.host.call_us
    return figures


def _median_of(rounds: list[Round], name: str) -> float | None:
    values = [each.clocks[name] for each in rounds if each.clocks.get(name) is not None]
    return float(np.median(values)) if values else None


def frame(records: Iterable[CellRecord]) -> pd.DataFrame:
    """Return all rows as a table, which has all columns even without a row."""
    table = pd.DataFrame([row(record) for record in records], columns=list(COLUMNS))
    # Nullable: as floats, next to an empty cell, bytes would be written with six digits.
    return table.astype(dict.fromkeys(_INTEGERS, "Int64"))


def export_csv(folder: Path, records: Iterable[CellRecord]) -> pd.DataFrame:
    """Write results.csv of records into a folder; return the table."""
    table = frame(records)
    write_into(folder, {"results.csv": as_csv(table, index=False)})
    return table


def read_csv(folder: Path) -> pd.DataFrame:
    """Return results.csv as a table with the folder as a column.

    Raises:
        ResultsError: the file cannot be read, or a column has a value of another type.
    """
    path = folder / "results.csv"
    try:
        text = io.BytesIO(read_file(path))
        table = pd.read_csv(text, dtype={n: str for n, hint in _TYPES.items() if hint is str})
    except (OSError, ValueError) as error:
        raise ResultsError(f"cannot read {path}: {one_line(error)}") from error
    if lacking := [name for name in _REQUIRED if name not in table]:
        raise ResultsError(f"{path}: expected columns {', '.join(_REQUIRED)}; got no {lacking[0]}")
    more = [name for name in COLUMNS if name not in {*table, *CELL_COLUMNS}]
    table = table.reindex(columns=[*table, *more])
    for name in table.columns.intersection(list(_TYPES)):
        column, hint = table[name], _TYPES[name]
        if name in _NAMES:
            wrong, expected = column[~column.isin(_NAMES[name])], ", ".join(_NAMES[name])
        elif hint is bool:
            wrong, expected = column[~column.isin([True, False])], "True or False"
        elif hint is str:
            continue
        else:
            numbers, expected = pd.to_numeric(column, errors="coerce"), "a number"
            fine = np.isfinite(numbers) & (np.abs(numbers) < 2.0**63)
            if name in ("median_us", "ci_lo_us", "ci_hi_us"):
                fine &= numbers > 0
            if hint is int:
                expected = "an integer"
                fine &= numbers % 1 == 0
            is_given = (
                table.get("median_us", column) if name.startswith("ci_") else column
            ).notna()
            wrong = column[~fine & (is_given | (name in CELL_COLUMNS))]
        if len(wrong):
            raise ResultsError(f"{path}: {name}: expected {expected}; got {wrong.iloc[0]!r:.40}")
    return table.assign(folder=str(folder))
