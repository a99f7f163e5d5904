"""results.csv: one row per cell, derived from the raw samples. Columns: docs/results-format.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pandas as pd

from fsbench.errors import ResultsError
from fsbench.records import breakdown, iomodel
from fsbench.records.cell import COLUMNS as CELL_COLUMNS
from fsbench.records.cell import CellRecord, Round, column_types
from fsbench.records.disk import write_into
from fsbench.records.sheet import as_csv
from fsbench.records.stats import median_interval


@dataclass(frozen=True)
class Figures:
    """The columns of results.csv that are derived from a cell's samples; docs have the units.

    Those that are not known, or do not apply, are None.
    """

    median_us: float | None = None
    ci_lo_us: float | None = None
    ci_hi_us: float | None = None
    min_us: float | None = None
    p10_us: float | None = None
    p90_us: float | None = None
    p99_us: float | None = None
    busy_us: float | None = None
    sum_us: float | None = None
    n_kernels: int | None = None
    n_samples: int | None = None
    gb_per_s: float | None = None
    tflops: float | None = None
    roofline_pct: float | None = None
    sm_mhz: float | None = None
    mem_mhz: float | None = None
    power_w: float | None = None
    throttle: str | None = None
    peak_extra_bytes: int | None = None
    config: str | None = None
    matmul_us: float | None = None
    sampling_us: float | None = None
    other_us: float | None = None
    split_by: str | None = None
    j_per_token: float | None = None
    energy_w: float | None = None
    idle_w: float | None = None
    sustained_us: float | None = None
    sustained_joules: float | None = None
    sustained_w: float | None = None
    first_call_s: float | None = None
    warm: str | None = None
    lacks: str | None = None


COLUMNS = (*CELL_COLUMNS, "status", "reason", *(each.name for each in fields(Figures)))
"""Of results.csv, in order."""


def row(record: CellRecord) -> dict[str, Any]:
    """The row of one cell: COLUMNS and their values."""
    known = {"status": record.status, "reason": record.reason}
    return {**record.cell.columns(), **known, **vars(figures(record))}


def figures(record: CellRecord) -> Figures:
    """What the samples of a cell come to; all None if it has none."""
    rounds = [record.rounds[number] for number in sorted(record.rounds)]
    if not rounds:
        return Figures()
    span, busy, total = (
        np.concatenate([getattr(each, name) for each in rounds])
        for name in ("span_us", "busy_us", "sum_us")
    )
    last = rounds[-1]
    median = float(np.median(span))
    low, high = median_interval(span.tolist())
    problem = record.cell.problem
    work = iomodel.traffic(problem)
    floor = iomodel.floor_us(problem, record.cell.conditions.gpu)
    energy, split = record.energy, breakdown.split(record)
    sustained = record.sustained
    joules = sustained.step_joules if sustained else None
    return Figures(
        median_us=median,
        ci_lo_us=low,
        ci_hi_us=high,
        min_us=float(span.min()),
        p10_us=float(np.percentile(span, 10)),
        p90_us=float(np.percentile(span, 90)),
        p99_us=float(np.percentile(span, 99)),
        busy_us=float(np.median(busy)) if len(busy) else None,
        sum_us=float(np.median(total)) if len(total) else None,
        n_kernels=last.n_kernels,
        n_samples=len(span),
        gb_per_s=work.fused_bytes / median / 1e3 if median else None,
        tflops=work.flops / median / 1e6 if median else None,
        roofline_pct=100 * floor / median if floor and median else None,
        sm_mhz=_median_of(rounds, "sm_mhz"),
        mem_mhz=_median_of(rounds, "mem_mhz"),
        power_w=_median_of(rounds, "power_w"),
        throttle="|".join(sorted({t for r in rounds for t in r.clocks.get("throttle", [])})),
        peak_extra_bytes=last.peak_extra_bytes,
        config=last.config,
        matmul_us=split.matmul_us if split else None,
        sampling_us=split.sampling_us if split else None,
        other_us=split.other_us if split else None,
        split_by=split.by if split else None,
        j_per_token=energy.joules / energy.steps / problem.B if energy else None,
        energy_w=energy.joules / energy.seconds if energy else None,
        idle_w=energy.idle_w if energy else None,
        sustained_us=sustained.step_us if sustained else None,
        sustained_joules=joules,
        sustained_w=joules / sustained.step_us * 1e6 if sustained and joules is not None else None,
        first_call_s=rounds[0].first_call_s,
        warm="|".join(rounds[0].warm),
        lacks="; ".join(f"{what}: {reason}" for what, reason in record.lacks.items()),
    )


def _median_of(rounds: list[Round], name: str) -> float | None:
    known = [each.clocks[name] for each in rounds if each.clocks.get(name) is not None]
    return float(np.median(known)) if known else None


def frame(records: Iterable[CellRecord]) -> pd.DataFrame:
    """All rows as a table; it has all its columns even without a row."""
    table = pd.DataFrame([row(record) for record in records], columns=list(COLUMNS))
    # Nullable: as floats, next to an empty cell, bytes would be written with six digits.
    return table.astype({each.name: "Int64" for each in fields(Figures) if "int" in each.type})


def export_csv(folder: Path, records: Iterable[CellRecord]) -> pd.DataFrame:
    """Write results.csv of the records of points.jsonl into a folder; returns the table."""
    table = frame(records)
    write_into(folder, {"results.csv": as_csv(table, index=False)})
    return table


def read_csv(folders: Iterable[Path]) -> pd.DataFrame:
    """The results.csv of several folders, one below the other, with the folder as a column.

    Raises:
        ResultsError: a file cannot be read, or a column has a value of another type.
    """
    return pd.concat([_read_csv(folder) for folder in folders], ignore_index=True)


def _read_csv(folder: Path) -> pd.DataFrame:
    path = folder / "results.csv"
    types = {**column_types(), "status": str, "reason": str, **get_type_hints(Figures)}
    try:
        table = pd.read_csv(path, dtype={n: str for n, hint in types.items() if _is(str, hint)})
    except (OSError, ValueError) as error:
        raise ResultsError(f"cannot read {path}: {error}") from error
    for name in table.columns.intersection(list(types)):
        column, hint = table[name], types[name]
        if _is(bool, hint):
            wrong, expected = column[~column.isin([True, False])], "True or False"
        elif _is(str, hint):
            continue
        else:
            numbers, expected = pd.to_numeric(column, errors="coerce"), "a number"
            fine = np.isfinite(numbers)
            if name in ("median_us", "ci_lo_us", "ci_hi_us"):
                fine &= numbers > 0
            if hint is int:
                expected = "an integer"
                fine &= numbers % 1 == 0
            given = (table.get("median_us", column) if name.startswith("ci_") else column).notna()
            wrong = column[~fine & (given | (name in CELL_COLUMNS))]
        if len(wrong):
            raise ResultsError(f"{path}: {name}: expected {expected}; got {wrong.iloc[0]!r:.40}")
    return table.assign(folder=str(folder))


def _is(kind: type, hint: Any) -> bool:
    return hint is kind or kind in get_args(hint)
