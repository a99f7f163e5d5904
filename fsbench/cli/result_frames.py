"""Read results folders as one table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fsbench.errors import ResultsError
from fsbench.records import summary
from fsbench.records.disk import refusals
from fsbench.records.store import (
    POINTS,
    TABLE,
    read_environment,
    read_records,
    results_folders,
)
from fsbench.report.tables import normalized


def run_folders(paths: list[Path]) -> list[Path]:
    """Return the results folders at and below these paths without repetitions, in this order."""
    return list(dict.fromkeys(folder.resolve() for folder in results_folders(paths)))


def by_time(paths: list[Path]) -> list[Path]:
    """Return the results folders at and below these paths, the earliest run first."""
    return sorted(run_folders(paths), key=lambda folder: str(read_environment(folder).get("utc")))


def read_results(paths: list[Path]) -> pd.DataFrame:
    """Return the rows of all runs (run_folders).

    Rows are derived from the raw samples, points.jsonl. Of a run whose samples are packed, or were
    left out, results.csv is read: it is many times as fast, and such a run is not continued.
    """
    return pd.concat(map(_rows, run_folders(paths)), ignore_index=True)


def _rows(folder: Path) -> pd.DataFrame:
    if (folder / "env.json").exists():
        read_environment(folder)  # raises if damaged: the origin of the rows would be unknown
    with refusals("read", folder):
        from_samples = (folder / POINTS).exists() or not (folder / TABLE).exists()
    if not from_samples:
        return summary.read_csv(folder)
    return summary.frame(read_records(folder)).assign(folder=str(folder))


def measured_results(paths: list[Path]) -> pd.DataFrame:
    """Return read_results; at least one cell must be measured.

    Raises:
        ResultsError: no cell was measured (the message counts statuses), or columns are missing.
    """
    frame = read_results(paths)
    counts = normalized(frame)["status"].value_counts() if len(frame) else {}
    if not counts.get("ok"):
        got = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no cell"
        raise ResultsError(f"results: expected at least one cell with status ok; got {got}")
    return frame
