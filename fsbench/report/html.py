"""Write results as self-contained HTML pages, one per GPU, with tables and figures."""

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
from fsbench.report.figures.catalog import plain, planned
from fsbench.report.figures.configuration import speedups
from fsbench.report.figures.parallel import drawn
from fsbench.report.figures.parts import Styles, encoded
from fsbench.report.figures.style import styles
from fsbench.report.measurement_warnings import measurement_warnings
from fsbench.report.recommend import recommend
from fsbench.report.tables import Configuration, configurations

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
"""Fields of env.json shown on a page -> heading."""


def pages(
    frame: pd.DataFrame, environments: dict[Path, dict[str, Any]]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield a page for each GPU in the results, or for a CPU.

    Args:
        frame: results of one or several runs, with at least one cell with status ok.
        environments: env.json of every run, by folder.

    Yields:
        (short name of the GPU, or cpu; page as HTML; card for the index).
    """
    looks = styles(frame)
    by_gpu: dict[str, list[Configuration]] = {}
    for each in configurations(frame):
        by_gpu.setdefault(each.rows.gpu.iloc[0] or "cpu", []).append(each)
    for name, measured in by_gpu.items():
        yield name, *_page(name, measured, looks, environments)


def index_page(cards: Iterable[dict[str, Any]]) -> str:
    """Return the index: a verdict, a figure and a link for each page."""
    return _rendered(title="fsbench results", cards=list(cards), parts=[])


def _rendered(**context: Any) -> str:
    template = (resources.files(__package__) / "page.html").read_text(encoding="utf-8")
    none: dict[str, Any] = {"run_columns": [], "runs": [], "warnings": [], "overview": []}
    none |= {"cards": [], "verdict": ""}
    made = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return made.from_string(template).render(**{**none, **context})


def _page(
    name: str,
    measured: list[Configuration],
    looks: Styles,
    environments: dict[Path, dict[str, Any]],
) -> tuple[str, dict[str, Any]]:
    """Return the page of a GPU and its card."""
    rows = pd.concat([each.rows for each in measured])
    folders = set(rows.folder)
    runs = {folder: record for folder, record in environments.items() if str(folder) in folders}
    plans = list(planned(measured, ("winner", "filters"), looks))
    plans += planned(plain(measured), ("runtime",), looks)
    drawings = [partial(_inline, kind, drawing) for kind, _, drawing in plans]
    figures = list(zip(plans, drawn(drawings), strict=True))
    of_each = {stem: figure for (kind, stem, _), figure in figures if kind == "runtime"}
    overview = [figure for (kind, *_), figure in figures if figure and kind != "runtime"]
    title = f"Exact sampling on {rows.gpu_name.iloc[0] or 'a CPU'}"
    verdict = verdict_in_words(measured)
    text = _rendered(
        title=title,
        verdict=verdict,
        run_columns=["run", *_RUN.values()],
        runs=[
            [folder.name, *(_short(field, record.get(field)) for field in _RUN)]
            for folder, record in runs.items()
        ],
        warnings=measurement_warnings(rows),
        overview=overview,
        parts=[
            {
                "title": each.heading,
                "conditions": each.conditions,
                "tables": [_times(each), *_speedups(each)],
                "figure": of_each.get(each.stem),
            }
            for each in measured
        ],
    )
    shown = next(iter([*overview, *filter(None, of_each.values())]), None)
    return text, {"name": name, "title": title, "verdict": verdict, "figure": shown}


def verdict_in_words(measured: list[Configuration]) -> str:
    """Return a sentence: how often a fused sampler is fastest, and what it saves."""
    advice = [
        (bool(each.rows[each.rows.provider == one.best].fused.iloc[0]), one.saves)
        for each in plain(measured)
        for one in recommend(each, each.providers(each.drawn))
        if one.saves is not None and len(each.measured.fused.unique()) > 1
    ]
    saved = sorted(saves for fused, saves in advice if fused)
    if not saved:
        return "No point has a fused sampler that is faster than one that stores its logits."
    middle = saved[len(saved) // 2]
    return (
        f"A fused sampler is the fastest at {len(saved)} of {len(advice)} points (LM head, "
        "conditions and B) where fused ones and others were measured; there it saves "
        f"{saved[0]:.0%} to {saved[-1]:.0%} of the time of the fastest that stores logits, "
        f"{middle:.0%} at the median."
    )


def _short(name: str, value: Any) -> str:
    text = str(value or "")
    return text[:7] if name == "git_sha" else text[:16].replace("T", " ") if name == "utc" else text


def _inline(name: str, drawing: Callable[[], Figure | None]) -> dict[str, str] | None:
    """Return a figure as a data URL. Text stays text, a quarter of the size of outlines."""
    figure = drawing()
    if figure is None:
        return None
    with mpl.rc_context({"svg.fonttype": "none"}):
        data = base64.b64encode(encoded(figure, "svg")).decode()
    return {"name": name, "source": f"data:image/svg+xml;base64,{data}"}


def _times(configuration: Configuration) -> dict[str, Any]:
    """Return median times by sampler and B; a cell that was not measured shows its status."""
    latest = configuration.rows.drop_duplicates(["provider", "b"], keep="last")
    rows = []
    for provider, rows_of_sampler in latest.groupby("provider", sort=False):
        kind = Kind(rows_of_sampler.kind.iloc[0])
        note = "" if kind is Kind.EXACT else f" ({kind.replace('_', ' ')})"
        cells = {row.b: _cell(row.status) for row in rows_of_sampler.itertuples()}
        measured = configuration.measured
        for row in measured[measured.provider == provider].itertuples():
            interval = f"{LEVEL:.0%}: {row.ci_lo_us:.1f} to {row.ci_hi_us:.1f}"
            cells[row.b] = _cell(f"{row.median_us:.1f}", interval)
        label = configuration.label(str(provider)) + note
        rows.append((label, cells, kind is not Kind.EXACT))
    return _table("Median time, µs", rows)


def _speedups(configuration: Configuration) -> list[dict[str, Any]]:
    """Return a table per fused exact sampler: its speedup over each unfused one, by B."""
    tables = []
    for fused, ratios in speedups(configuration).items():
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
    """Return a table by B. rows: (label, cells by B, whether it is a lower bound)."""
    batches = sorted({B for _, cells, _ in rows for B in cells})
    lines = [
        {"cells": [_cell(label), *(cells.get(B, _cell("")) for B in batches)], "bound": bound}
        for label, cells, bound in rows
    ]
    return {"title": title, "headings": ["sampler", *batches], "rows": lines}


def _cell(text: str, title: str = "") -> _Cell:
    return {"text": text, "title": title}
