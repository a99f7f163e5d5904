"""Results folders as one table, for the commands that read them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fsbench.analysis.tables import normalized
from fsbench.errors import ResultsError
from fsbench.records import summary
from fsbench.records.store import read_records, results_folders


def run_folders(paths: list[Path]) -> list[Path]:
    """The results folders at and below these paths, each once, in the order given."""
    return list(dict.fromkeys(folder.resolve() for folder in results_folders(paths)))


def read_results(paths: list[Path]) -> pd.DataFrame:
    """The rows of all runs (run_folders)."""
    tables = []
    for folder in run_folders(paths):
        if not (folder / "results.csv").exists():  # a run that was killed: derive it, in memory
            tables.append(summary.frame(read_records(folder)).assign(folder=str(folder)))
            continue
        try:
            tables.append(summary.read_csv([folder]))
        except (OSError, ValueError) as error:
            raise ResultsError(f"cannot read {folder / 'results.csv'}: {error}") from error
    return pd.concat(tables, ignore_index=True)


def measured_results(paths: list[Path]) -> pd.DataFrame:
    """read_results, of at least one cell that was measured.

    Raises:
        ResultsError: there is none, and the message counts what there is instead; or columns are
            missing.
    """
    frame = read_results(paths)
    counts = normalized(frame)["status"].value_counts() if len(frame) else {}
    if not counts.get("ok"):
        got = ", ".join(f"{count} {status}" for status, count in counts.items()) or "no cell"
        raise ResultsError(f"results: expected at least one cell with status ok; got {got}")
    return frame
