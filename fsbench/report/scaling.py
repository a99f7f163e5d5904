"""Time against the number of GPUs that share the vocabulary: the paper's Table 6, as measured.

Times are the minimum and the median over all steps, each the time of the slowest rank.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from fsbench.records.disk import refusals, write_atomically
from fsbench.records.sheet import as_csv
from fsbench.report.tables import Configuration, stems


def over_ranks(found: list[Configuration]) -> dict[str, list[Configuration]]:
    """Configurations that differ in nothing but `tp`, ascending; only where there are several.

    The keys are stems for the names of common files.
    """
    groups = stems(found, free=["tp"])
    return {
        stem: sorted(alike, key=lambda each: int(each.rows.tp.iloc[0]))
        for stem, alike in groups.items()
        if len(alike) > 1
    }


def scaling_table(alike: list[Configuration]) -> pd.DataFrame:
    """One row per B and provider; for each number n of GPUs tpN_min_us, tpN_median_us, tpN_ideal.

    tpN_ideal is the share of ideal scaling: the minimum on one GPU / (n times that on n GPUs).
    """
    parts = []
    for configuration in alike:
        n = int(configuration.rows.tp.iloc[0])
        rows = configuration.measured.set_index(["b", "provider"])
        names = {"min_us": f"tp{n}_min_us", "median_us": f"tp{n}_median_us"}
        parts.append(rows[list(names)].rename(columns=names))
    table = pd.concat(parts, axis=1).sort_index()
    labels = pd.concat([each.measured.set_index(["b", "provider"]).label for each in alike])
    table.insert(0, "label", labels[~labels.index.duplicated(keep="last")])
    if "tp1_min_us" in table:
        for configuration in alike[1:]:
            n = int(configuration.rows.tp.iloc[0])
            table[f"tp{n}_ideal"] = table.tp1_min_us / (n * table[f"tp{n}_min_us"])
    return table


def write_scaling(folder: Path, found: list[Configuration]) -> list[Path]:
    """Write scaling_<stem>.csv for every group of over_ranks; returns the paths."""
    written = []
    with refusals("write tables in", folder):
        for stem, alike in over_ranks(found).items():
            written.append(folder / f"scaling_{stem}.csv")
            write_atomically(written[-1], as_csv(scaling_table(alike)))
    return written
