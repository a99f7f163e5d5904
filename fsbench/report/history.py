"""The same cell over commits: what every run at hand measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fsbench.report.tables import Configuration


@dataclass(frozen=True)
class History:
    """Median times in microseconds of cells that several commits measured.

    runs: (folder, when in UTC, commit), the earliest first.
    cells: (sampler, B) -> a time for each run, None where it has none.
    """

    runs: list[tuple[str, str, str]]
    cells: dict[tuple[str, int], list[float | None]]


def history(configuration: Configuration, runs: Mapping[str, tuple[str, str]]) -> History:
    """The history of a configuration; empty where no cell was measured at two commits.

    runs: folder -> (when in UTC, commit).
    """
    ok = configuration.rows[configuration.rows.status == "ok"]
    ok = ok.assign(commit=ok.folder.map({folder: commit for folder, (_, commit) in runs.items()}))
    ok = ok[ok.groupby(["provider", "b"]).commit.transform("nunique") > 1]
    order = sorted((*runs[folder], folder) for folder in ok.folder.unique())
    cells = {}
    for (provider, B), rows in ok.groupby(["provider", "b"], sort=False):
        times = rows.drop_duplicates("folder", keep="last").set_index("folder").median_us
        cells[provider, int(B)] = [
            float(times[folder]) if folder in times else None for _, _, folder in order
        ]
    return History([(folder, when, commit) for when, commit, folder in order], cells)
