"""Time by number of GPUs that share the vocabulary, as in the paper's Table 6.

Times are the minimum and the median over all steps, each the time of the slowest rank.
"""

from __future__ import annotations

import pandas as pd

from fsbench.records.sheet import as_csv
from fsbench.report.tables import Configuration, stems


def over_ranks(measured: list[Configuration]) -> dict[str, list[Configuration]]:
    """Group configurations that differ only in `tp`, ascending, by a stem for file names.

    Groups with one value of `tp` are left out.
    """
    groups = stems(measured, free=["tp"])
    return {
        stem: sorted(alike, key=lambda each: int(each.rows.tp.iloc[0]))
        for stem, alike in groups.items()
        if len(alike) > 1
    }


def scaling_table(alike: list[Configuration]) -> pd.DataFrame:
    """Return a row per B and provider with tpN_min_us, tpN_median_us, tpN_ideal for N GPUs.

    tpN_ideal is the scaling efficiency: minimum on one GPU / (N x minimum on N GPUs).
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


def files(measured: list[Configuration]) -> dict[str, str]:
    """Return the table of every group of over_ranks as CSV, by file name."""
    return {
        f"scaling_{stem}.csv": as_csv(scaling_table(alike))
        for stem, alike in over_ranks(measured).items()
    }
