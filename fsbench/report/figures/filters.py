"""Heat maps of the cost of sampling with filters: filters by B, a panel per sampler."""

from __future__ import annotations

import math
import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fsbench.provider import Kind
from fsbench.report.figures.parts import laid_out, plain_log_ticks
from fsbench.report.tables import (
    FILTERS,
    Configuration,
    conditions_in_words,
    filters_in_words,
    stems,
)

_COLUMNS = 6  # panels in a row


def over_filters(configurations: list[Configuration]) -> dict[str, list[Configuration]]:
    """Group truncated configurations that differ only in their filters, by a stem for a file."""
    truncated = [each for each in configurations if each.drawn is Kind.TRUNCATED]
    return stems(truncated, FILTERS)


def cost_table(group: list[Configuration]) -> pd.DataFrame:
    """Divide times by the time of the slowest lower bound, the matmul alone, of the same run.

    Returns:
        Columns provider, label, filters (as text), b, ratio; sorted by top-k, top-p and min-p.
    """
    rows = []
    for each in sorted(group, key=_order):
        bounds = each.providers(Kind.LOWER_BOUND)
        if not bounds:
            continue
        medians = each.measured.groupby("provider").median_us.max()
        bound = max(bounds, key=lambda name: float(medians[name]))
        words = filters_in_words(each.rows.iloc[0])
        for provider in each.providers(Kind.TRUNCATED):
            for b, value in each.ratio(provider, bound).value.items():
                rows.append((provider, each.label(provider), words, b, value))
    return pd.DataFrame(rows, columns=["provider", "label", "filters", "b", "ratio"])


MIN_P_CHANGES = 0.05
"""Rows that add min-p to other filters are left out if min-p changes no time by more than this."""


def without_min_p(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Leave out rows with min-p and another filter if min-p changes no time by MIN_P_CHANGES.

    Returns:
        (table, note on the rows left out and their largest difference, or '').
    """
    ratios = table.set_index(["provider", "filters", "b"]).ratio
    changes, added = [], set()
    for (provider, words, b), ratio in ratios.items():
        others, separator, last = words.rpartition(", min-p ")
        without = ratios.get((provider, others, b)) if separator and "," not in last else None
        if without is not None:
            changes.append(abs(ratio / without - 1))
            added.add(words)
    if not changes or max(changes) > MIN_P_CHANGES:
        return table, ""
    note = f"min-p in addition to top-k changes a time by at most {max(changes):.0%}: not shown"
    return table[~table.filters.isin(added)], note


@laid_out
def draw(group: list[Configuration]) -> Figure | None:
    """Draw configurations that differ in their filters; return None without a lower bound.

    A cell is the time of a step / time of the matmul alone; 1 means that sampling is free.
    """
    table = cost_table(group)
    if table.empty:
        return None
    table, note = without_min_p(table)
    filters, batches = list(table.filters.unique()), sorted(table.b.unique())
    names = list(table.groupby("provider").ratio.median().sort_values().index)
    columns = min(_COLUMNS, len(names))
    lines = math.ceil(len(names) / columns)
    size = (2.4 + (0.12 + 0.39 * len(batches)) * columns, (0.7 + 0.14 * len(filters)) * lines + 1.2)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    norm = LogNorm(min(1.0, table.ratio.min()), max(2.0, table.ratio.quantile(0.9)))
    for axes in panels.flat[len(names) :]:
        axes.set_visible(False)
    for axes, name in zip(panels.flat, names, strict=False):
        rows = table[table.provider == name]
        cells = rows.pivot(index="filters", columns="b", values="ratio")
        image = _heat(axes, cells.reindex(index=filters, columns=batches), norm)
        axes.set_title(textwrap.fill(rows.label.iloc[-1], 7 * len(batches)), fontsize=8)
    for axes in panels[:, 0]:
        axes.set_yticks(range(len(filters)), filters, fontsize=8)
    figure.supxlabel("Batch size B (rows)", fontsize=9)
    bar = figure.colorbar(
        image, ax=panels, location="bottom", shrink=0.5, aspect=50, pad=0.01, extend="max"
    )
    bar.set_label("time / time of the matmul alone, log scale", fontsize=8)
    plain_log_ticks(bar.ax.xaxis)
    row = group[0].rows.iloc[0].copy()
    for name, off in FILTERS.items():
        row[name] = off
    words = f"{group[0].title}; {conditions_in_words(row)}"
    title = ["Time of a decode step / time of the matmul alone (lower is better)", words, note]
    figure.suptitle("\n".join(filter(None, title)), fontsize=9)
    return figure


def _heat(axes: Axes, cells: pd.DataFrame, norm: LogNorm) -> AxesImage:
    image = axes.imshow(cells.to_numpy(dtype=float), norm=norm, cmap="viridis_r", aspect="auto")
    for y, values in enumerate(cells.to_numpy()):
        for x, value in enumerate(values):
            if not math.isnan(value):
                color = "white" if norm(value) > 0.45 else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", color=color, fontsize=8)
    axes.set_xticks(range(cells.shape[1]), [str(B) for B in cells.columns], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(False)
    return image


def _order(configuration: Configuration) -> tuple[bool, float, float, float]:
    row = configuration.rows.iloc[0]
    return bool(row.mixed), row.top_k or math.inf, -row.top_p, row.min_p
