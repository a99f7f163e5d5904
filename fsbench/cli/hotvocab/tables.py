"""What `fsbench hotvocab` prints of a folder of its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbench.cli.tables import console, plain_table
from fsbench.errors import ResultsError

if TYPE_CHECKING:
    import pandas as pd

    from fsbench.simple.hot import Coverage
    from fsbench.simple.sizing import Cost


def read_fit(folder: Path) -> tuple[Coverage, Cost, pd.DataFrame]:
    """What `fit` wrote. Raises ResultsError."""
    import numpy as np
    import pandas as pd

    from fsbench.simple.hot import Coverage
    from fsbench.simple.sizing import Cost

    try:
        facts = json.loads((folder / "fit.json").read_text())
        scans = pd.read_csv(folder / "scans.csv")
        cover = Coverage(facts["v"], *(np.array(facts[name]) for name in ("sizes", "mean", "low")))
        return cover, Cost(**facts["cost"]), scans
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{folder}: expected a folder of `fsbench hotvocab`; {error}") from error


def print_size(folder: Path, c_us: float | None = None, c0_us: float | None = None) -> None:
    from fsbench.simple import sizing

    cover, cost, scans = read_fit(folder)
    if c_us is not None and c0_us is not None:
        cost = sizing.Cost(c_us, c0_us, (c_us, c_us), (c0_us, c0_us))
    table = plain_table("Hot tokens: how many, and what a row then costs")
    for heading in ("", "H*, eq. 12", "H*, least", "covered", "us", "rows/s"):
        table.add_column(heading, justify="right" if heading else "left")
    for both, name in ((False, "F, eq. 10"), (True, "F2, hot always scanned")):
        best = sizing.best(cover, cost, both)
        table.add_row(
            name,
            "-" if best.root is None else f"{best.root:,.0f}",
            f"{best.H:,}",
            f"{float(cover.at(best.H)):.3f}",
            f"{best.cost_us:.2f}",
            f"{1e6 / best.cost_us:,.0f}",
        )
    if c_us is None and scans.row_us.notna().all():
        at = scans.loc[scans.row_us.idxmin()]
        table.add_row(
            "measured", "", f"{at.h:,.0f}", f"{at.hits:.3f}", f"{at.row_us:.2f}",
            f"{1e6 / at.row_us:,.0f}",
        )  # fmt: skip
    console().print(table)
    low, high = cost.c_interval_us
    low0, high0 = cost.c0_interval_us
    print(
        f"c = {1e3 * cost.c_us:.4f} ns per token [{1e3 * low:.4f}, {1e3 * high:.4f}], "
        f"c0 = {cost.c0_us:.2f} us [{low0:.2f}, {high0:.2f}]"
    )


def print_bench(folder: Path) -> None:
    import pandas as pd

    for name, (title, headings) in _SHOWN.items():
        path = folder / f"{name}.csv"
        if path.exists():
            frame = pd.read_csv(path)[list(headings)]
            table = plain_table(title)
            for heading in headings.values():
                table.add_column(heading, justify="right")
            for row in frame.itertuples(index=False):
                table.add_row(*map(_cell, row))
            console().print(table)


_BUSY = {"exposed_serial_us": "exposed, serial", "exposed_overlapped_us": "exposed, overlapped"}
_SHOWN: dict[str, tuple[str, dict[str, str]]] = {
    "steps": (
        "One sampler in the four designs of SIMPLE's ablation",
        dict(controls="controls", design="design", row_us="us per row", rows_per_s="rows/s")
        | {"times_first": "x the port"},
    ),
    "scaling": (
        "More samplers",
        dict(design="design", samplers="samplers", rows_per_s="rows/s", efficiency="efficiency"),
    ),
    "penalties": ("Penalties", dict(seen="tokens seen", row_us="us per row", ratio="x none")),
    "ring": ("The ring", dict(b="B", ring_us="us per step", overhead_us="of it ring")),
    "copies": ("Copies over the bus", dict(b="B", what="what", time_us="us", gb_per_s="GB/s")),
    "overlap": (
        "Time per step that a GPU waits",
        dict(b="B", design="design", nothing_us="forward us", **_BUSY, hidden_us="hidden"),
    ),
}
"""Table -> its title, and the headings of the columns that are shown."""


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
