"""results.csv: one row per cell, derived from the raw samples. Columns: docs/results-format.md."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fsbench.problem import Problem
from fsbench.records import breakdown, iomodel
from fsbench.records.disk import refusals, write_atomically
from fsbench.records.sheet import as_csv
from fsbench.records.stats import median_interval
from fsbench.records.store import Cell, CellRecord, read_records

_PARTS = ("matmul_us", "sampling_us", "other_us")
_MEASURED_COLUMNS = (
    *("median_us", "ci_lo_us", "ci_hi_us", "min_us", "p10_us", "p90_us", "p99_us"),
    *("busy_us", "sum_us", "n_kernels", "n_samples"),
    *("gb_per_s", "tflops", "roofline_pct"),
    *("sm_mhz", "mem_mhz", "power_w", "throttle", "peak_extra_bytes", "config"),
    *_PARTS,
    "split_by",
    *("j_per_token", "energy_w", "idle_w", "first_call_s", "warm", "lacks"),
)
_INTEGERS = ("n_kernels", "n_samples", "peak_extra_bytes")


def row(record: CellRecord) -> dict[str, Any]:
    """The row of one cell. A cell without samples has None in every measured column."""
    cell = record.cell
    values: dict[str, Any] = {**asdict(cell), "status": record.status, "reason": record.reason}
    values |= dict.fromkeys(_MEASURED_COLUMNS)
    rounds = [record.rounds[number] for number in sorted(record.rounds)]
    if not rounds:
        return values
    span = np.concatenate([r.span_us for r in rounds])
    busy = np.concatenate([r.busy_us for r in rounds])
    total = np.concatenate([r.sum_us for r in rounds])
    last = rounds[-1]
    median = float(np.median(span))
    low, high = median_interval(span.tolist())
    problem = Problem(
        *(cell.b, cell.d, cell.v, cell.dtype, cell.temperature, cell.device, cell.logits, cell.tp),
        *(cell.top_k, cell.top_p, cell.min_p, cell.mixed),
        *(cell.repetition_penalty, cell.presence_penalty, cell.frequency_penalty, cell.history),
    )
    work = iomodel.traffic(problem)
    floor = iomodel.floor_us(problem, cell.gpu)
    values |= {
        "median_us": median,
        "ci_lo_us": low,
        "ci_hi_us": high,
        "min_us": float(span.min()),
        "p10_us": float(np.percentile(span, 10)),
        "p90_us": float(np.percentile(span, 90)),
        "p99_us": float(np.percentile(span, 99)),
        "busy_us": float(np.median(busy)) if len(busy) else None,
        "sum_us": float(np.median(total)) if len(total) else None,
        "n_kernels": last.n_kernels,
        "n_samples": len(span),
        "gb_per_s": work.fused_bytes / median / 1e3,
        "tflops": work.flops / median / 1e6,
        "roofline_pct": 100 * floor / median if floor else None,
        "sm_mhz": _median_of(rounds, "sm_mhz"),
        "mem_mhz": _median_of(rounds, "mem_mhz"),
        "power_w": _median_of(rounds, "power_w"),
        "throttle": "|".join(sorted({t for r in rounds for t in r.clocks.get("throttle", [])})),
        "peak_extra_bytes": last.peak_extra_bytes,
        "config": last.config,
        **_split(record),
        **_energy(record),
        "first_call_s": rounds[0].first_call_s,
        "warm": "|".join(rounds[0].warm),
        "lacks": "; ".join(f"{what}: {reason}" for what, reason in record.lacks.items()),
    }
    return values


def _split(record: CellRecord) -> dict[str, Any]:
    found = breakdown.split(record)
    if found is None:
        return {}
    return {**{name: getattr(found, name) for name in _PARTS}, "split_by": found.by}


def _energy(record: CellRecord) -> dict[str, Any]:
    energy = record.energy
    if energy is None:
        return {}
    return {
        "j_per_token": energy.joules / energy.steps / record.cell.b,
        "energy_w": energy.joules / energy.seconds,
        "idle_w": energy.idle_w,
    }


def _median_of(rounds: list[Any], name: str) -> float | None:
    known = [r.clocks[name] for r in rounds if r.clocks.get(name) is not None]
    return float(np.median(known)) if known else None


def frame(records: Iterable[CellRecord]) -> pd.DataFrame:
    """All rows as a table; it has all its columns even without a row."""
    columns = [*(field.name for field in fields(Cell)), "status", "reason", *_MEASURED_COLUMNS]
    table = pd.DataFrame([row(record) for record in records], columns=columns)
    # Nullable: as floats, next to an empty cell, bytes would be written with six digits.
    return table.astype(dict.fromkeys(_INTEGERS, "Int64"))


def export_csv(folder: Path) -> pd.DataFrame:
    """Derive results.csv from points.jsonl in one folder; returns the table."""
    table = frame(read_records(folder))
    with refusals("write results in", folder):
        write_atomically(folder / "results.csv", as_csv(table, index=False))
    return table


def read_csv(folders: Iterable[Path]) -> pd.DataFrame:
    """The results.csv of several folders, one below the other, with the folder as a column."""
    tables = [pd.read_csv(folder / "results.csv").assign(folder=str(folder)) for folder in folders]
    return pd.concat(tables, ignore_index=True)
