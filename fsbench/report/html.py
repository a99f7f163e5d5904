"""Results as HTML pages, one for each GPU, that need nothing beside them: tables, figures."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from fsbench.provider import Kind
from fsbench.records.stats import LEVEL
from fsbench.report.audit import HEADINGS, Audited
from fsbench.report.doubts import doubts
from fsbench.report.figures import configuration as plotting
from fsbench.report.figures import filters, winners
from fsbench.report.figures.parallel import drawn
from fsbench.report.figures.parts import Styles, encoded
from fsbench.report.figures.style import styles
from fsbench.report.history import history
from fsbench.report.tables import Configuration, configurations, families

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


def pages(
    frame: pd.DataFrame, environments: dict[Path, dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """(short name of a GPU, or cpu; its page as HTML), for each in the results.

    Args:
        frame: results of one or several runs, at least one cell of them with status ok.
        environments: env.json of every run, by its folder.
    """
    looks = styles(frame)
    by_gpu: dict[str, list[Configuration]] = {}
    for each in configurations(frame):
        by_gpu.setdefault(each.rows.gpu.iloc[0] or "cpu", []).append(each)
    for name, found in by_gpu.items():
        yield name, _page(found, looks, environments)


def audit_page(found: Iterable[Audited]) -> str:
    """The audit (fsbench.report.audit) as a page of the report."""
    rows = [
        {"cells": [_cell(text.replace("`", "")) for text in row], "bound": False}
        for each in found
        for row in each.rows(repeated=True)
    ]
    table = {"title": "Samplers, worst first", "headings": HEADINGS, "rows": rows}
    part = {"title": "What samplers claim, and what they were found to do", "tables": [table]}
    told = "By the records of fsbench verify; docs/audit.md says how to read it."
    return _rendered(
        title="Audit of samplers",
        parts=[{**part, "conditions": told, "figures": [], "absent": []}],
    )


def _rendered(**given: Any) -> str:
    template = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    none: dict[str, Any] = {"run_columns": [], "runs": [], "doubts": [], "overview": []}
    made = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return made.from_string(template).render(**{**none, **given})


def _page(
    found: list[Configuration], looks: Styles, environments: dict[Path, dict[str, Any]]
) -> str:
    rows = pd.concat([each.rows for each in found])
    folders = set(rows.folder)
    runs = {folder: record for folder, record in environments.items() if str(folder) in folders}
    # A sweep of filters has dozens of configurations: their figure is the heat map.
    drawn_ones = [each for each in found if each.drawn is not Kind.TRUNCATED]
    tasks = [
        partial(_inline, "winner", partial(winners.draw, alike, looks))
        for alike in families(found).values()
    ]
    tasks += [
        partial(_inline, "filters", partial(filters.draw, alike))
        for alike in filters.over_filters(found).values()
    ]
    overview = len(tasks)
    tasks += [
        partial(_inline, name, partial(plotting.draw, name, each, looks))
        for each in drawn_ones
        for name in plotting.FIGURES
    ]
    figures = list(drawn(tasks))
    each_has = len(plotting.FIGURES)
    shown = {
        each.stem: figures[start : start + each_has]
        for each, start in zip(drawn_ones, range(overview, len(figures), each_has), strict=True)
    }
    when = {
        str(folder): (_short("utc", record.get("utc")), _short("git_sha", record.get("git_sha")))
        for folder, record in runs.items()
    }
    parts = []
    for each in found:
        own = dict(zip(plotting.FIGURES, shown.get(each.stem, ()), strict=False))
        parts.append(
            {
                "title": each.title,
                "conditions": each.conditions,
                "tables": [_times(each), *_speedups(each), *_history(each, when)],
                "figures": [figure for figure in own.values() if figure],
                "absent": [
                    f"{name}: {plotting.ABSENT[name]}"
                    for name, figure in own.items()
                    if figure is None
                ],
            }
        )
    return _rendered(
        title=f"Exact sampling on {rows.gpu_name.iloc[0] or 'a CPU'}",
        run_columns=["run", *_RUN.values()],
        runs=[
            [folder.name, *(_short(name, record.get(name)) for name in _RUN)]
            for folder, record in runs.items()
        ],
        doubts=doubts(rows) if "roofline_pct" in rows else [],
        overview=[figure for figure in figures[:overview] if figure],
        parts=parts,
    )


def _short(name: str, value: Any) -> str:
    text = str(value or "")
    return text[:7] if name == "git_sha" else text[:16].replace("T", " ") if name == "utc" else text


def _inline(name: str, drawing: Callable[[], Figure | None]) -> dict[str, str] | None:
    """A figure as the page has it. Its texts stay texts: a quarter of the size of outlines."""
    figure = drawing()
    if figure is None:
        return None
    with mpl.rc_context({"svg.fonttype": "none"}):
        data = base64.b64encode(encoded(figure, "svg")).decode()
    return {"name": name, "source": f"data:image/svg+xml;base64,{data}"}


def _history(
    configuration: Configuration, when: dict[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """The cells that several commits measured, a column for each run; no table without any."""
    found = history(configuration, when)
    rows = []
    for (provider, B), times in found.cells.items():
        known = [us for us in times if us is not None]
        texts = ["" if us is None else f"{us:.1f}" for us in times]
        cells = [configuration.label(provider), str(B), *texts, f"{known[-1] / known[0]:.3f}"]
        rows.append({"cells": [_cell(text) for text in cells], "bound": False})
    headings = [f"{utc} {commit}" for _, utc, commit in found.runs]
    title = "History: median time by run and commit, µs"
    table = {"title": title, "headings": ["sampler", "B", *headings, "last / first"], "rows": rows}
    return [table] if rows else []


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
