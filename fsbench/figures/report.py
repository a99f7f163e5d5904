"""Results as one HTML page that needs nothing beside it: tables that sort, figures, machines."""

from __future__ import annotations

import base64
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from fsbench.analysis.doubts import doubts
from fsbench.analysis.tables import Configuration, configurations, families
from fsbench.figures import configuration as plotting
from fsbench.figures import winners
from fsbench.figures.parts import encoded
from fsbench.figures.style import styles
from fsbench.provider import Kind
from fsbench.records.stats import LEVEL

_Cell = dict[str, str]
_RUN = {
    "utc": "UTC",
    "gpu": "GPU",
    "git_sha": "commit",
    "driver": "driver",
    "torch": "torch",
    "triton": "triton",
    "flashinfer": "FlashInfer",
}
"""Fields of env.json that the page shows, and their headings."""


def page(frame: pd.DataFrame, environments: dict[Path, dict[str, Any]]) -> str:
    """The page, as HTML.

    Args:
        frame: results of one or several runs, at least one cell of them with status ok.
        environments: env.json of every run, by its folder.
    """
    found = configurations(frame)
    looks = styles(frame)
    overview = [_inline("winner", winners.draw(alike, looks)) for alike in families(found).values()]
    parts = []
    for each in found:
        figures = {
            name: _inline(name, plotting.draw(name, each, looks)) for name in plotting.FIGURES
        }
        parts.append(
            {
                "title": each.title,
                "conditions": each.conditions,
                "tables": [_times(each), *_speedups(each)],
                "figures": [figure for figure in figures.values() if figure],
                "absent": [
                    f"{name}: {plotting.ABSENT[name]}"
                    for name, figure in figures.items()
                    if figure is None
                ],
            }
        )
    template = (resources.files(__package__) / "report.html").read_text(encoding="utf-8")
    names = dict.fromkeys(each.rows.gpu_name.iloc[0] or "CPU" for each in found)
    return jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
        template
    ).render(
        title=f"Exact sampling on {', '.join(names)}",
        run_columns=["run", *_RUN.values()],
        runs=[
            [folder.name, *(_short(name, record.get(name)) for name in _RUN)]
            for folder, record in environments.items()
        ],
        doubts=doubts(frame) if "roofline_pct" in frame else [],
        overview=[figure for figure in overview if figure],
        parts=parts,
    )  # fmt: skip


def _short(name: str, value: Any) -> str:
    return str(value)[:7] if name == "git_sha" and value else str(value or "")


def _inline(name: str, figure: Figure | None) -> dict[str, str] | None:
    if figure is None:
        return None
    data = base64.b64encode(encoded(figure, "svg")).decode()
    return {"name": name, "source": f"data:image/svg+xml;base64,{data}"}


def _times(configuration: Configuration) -> dict[str, Any]:
    """Median time by sampler and B; a cell without a time shows its status."""
    latest = configuration.rows.drop_duplicates(["provider", "b"], keep="last")
    rows = []
    for provider, mine in latest.groupby("provider", sort=False):
        kind = Kind(mine.kind.iloc[0])
        note = "" if kind is Kind.EXACT else f" ({kind.replace('_', ' ')})"
        cells = {row.b: _cell(row.status) for row in mine.itertuples()}
        measured = configuration.measured
        for row in measured[measured.provider == provider].itertuples():
            interval = f"{LEVEL:.0%}: {row.ci_lo_us:.1f} to {row.ci_hi_us:.1f}"
            cells[row.b] = _cell(f"{row.median_us:.1f}", interval)
        label = configuration.label(str(provider)) + note
        rows.append((label, cells, kind is not Kind.EXACT))
    return _table("Median time, µs", rows)


def _speedups(configuration: Configuration) -> list[dict[str, Any]]:
    """For each fused exact sampler, its speedup over every unfused one, by B."""
    tables = []
    for fused, ratios in plotting.speedups(configuration).items():
        rows = []
        for other, table in ratios.items():
            cells = {
                row.Index: _cell(f"{row.value:.2f}", f"{row.lo:.2f} to {row.hi:.2f}")
                for row in table.itertuples()
            }
            rows.append((f"over {configuration.label(other)}", cells, False))
        tables.append(_table(f"Speedup of {configuration.label(fused)}", rows))
    return tables


def _table(title: str, rows: list[tuple[str, dict[Any, _Cell], bool]]) -> dict[str, Any]:
    """rows: (label, cells by B, whether it is a bound)."""
    batches = sorted({B for _, cells, _ in rows for B in cells})
    lines = [
        {"cells": [_cell(label), *(cells.get(B, _cell("")) for B in batches)], "bound": bound}
        for label, cells, bound in rows
    ]
    return {"title": title, "headings": ["sampler", *batches], "rows": lines}


def _cell(text: str, title: str = "") -> _Cell:
    return {"text": text, "title": title}
