"""Shared parts of figures: panels, axes, legend, layout, files.

Figures are matplotlib Figure objects without pyplot: no global state, no display.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import wraps
from io import BytesIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.text import Text

from fsbench.provider import Kind
from fsbench.records.disk import refusals, write_atomically
from fsbench.report.figures.style import SETTINGS, Style
from fsbench.report.tables import Configuration

Styles = dict[str, Style]
P = ParamSpec("P")
F = TypeVar("F", bound=Figure | None)

METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}
"""File format -> entries without date and version, so that equal figures give equal files."""

NOTES = {Kind.EXACT: "", Kind.LOWER_BOUND: "no sampling: "}
"""Prefix of labels by kind. A matmul that stores logits is no lower bound of a fused sampler."""

PLAIN = ticker.StrMethodFormatter("{x:,.10g}")


def laid_out(drawing: Callable[P, F]) -> Callable[P, F]:
    """Decorate a drawing function: apply SETTINGS and fix the layout of its figure."""

    @wraps(drawing)
    def drawn(*arguments: P.args, **options: P.kwargs) -> F:
        with mpl.rc_context(SETTINGS):
            figure = drawing(*arguments, **options)
            if figure is not None:
                texts = set(figure.findobj(Text))
                axis = [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
                ticks = [tick for each in axis for tick in (*each.majorTicks, *each.minorTicks)]
                for text in texts - {part for tick in ticks for part in (tick.label1, tick.label2)}:
                    # Text is prose, in which a dollar sign is no formula. Ticks may be powers.
                    text.set_parse_math(False)
                # Constrained layout moves a little at each drawing: without a fixed layout, a file
                # would depend on the formats saved before it.
                if engine := figure.get_layout_engine():
                    engine.execute(figure)
                figure.set_layout_engine("none")
        return figure

    return drawn


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically, in the format of the path's suffix.

    Equal figures give equal bytes. Raises ResultsError if the path cannot be written.
    """
    drawn = encoded(figure, path.suffix.removeprefix("."))
    with refusals("write figure", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, drawn)


def encoded(figure: Figure, file_format: str) -> bytes:
    """Return a figure as the content of a file; equal figures give equal bytes."""
    drawn = BytesIO()
    with mpl.rc_context(SETTINGS):
        if file_format == "png":  # the same bytes as savefig, which draws everything twice
            figure.set_dpi(mpl.rcParams["savefig.dpi"])
            FigureCanvasAgg(figure).print_png(drawn, metadata=METADATA["png"])
        else:
            figure.savefig(drawn, format=file_format, metadata=METADATA[file_format])
    return drawn.getvalue()


def percent_axis(axes: Axes, whole: float, label: str) -> None:
    """Add a y axis on the right, in percent of `whole`."""

    def to_percent(value: Any) -> Any:
        return 100 * value / whole

    def from_percent(percent: Any) -> Any:
        return percent * whole / 100

    axes.secondary_yaxis("right", functions=(to_percent, from_percent)).set_ylabel(label)


def grid(count: int, columns: int, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, with an empty cell at the end for the legend.

    A single panel has its legend on the right.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
    if count == 1:
        figure = Figure(figsize=(8.1, 4.2), layout=layout)
        return figure, [figure.subplots()]
    rows = count // columns + 1
    heights = [1.0] * rows
    if count % columns == 0:
        heights[-1] = 0.5  # only the legend is there
    figure = Figure(figsize=(8.8, 4.0 * sum(heights)), layout=layout)
    panels = figure.subplots(rows, columns, sharey=sharey, squeeze=False, height_ratios=heights)
    cells = list(panels.flat)
    for cell in cells[count:]:
        cell.set_axis_off()
    return figure, cells[:count]


def panel_row(
    configuration: Configuration, titles: list[str], sharey: bool = True
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a panel per title, and the configuration below the first title."""
    figure, panels = grid(len(titles), 2, sharey)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_title(title, fontweight="bold", pad=30)
    words = panels[0].annotate(
        f"{configuration.title}{_runs_in_words(configuration)}\n{configuration.conditions}",
        xy=(0, 1),
        xycoords="axes fraction",
        xytext=(0, 5),
        textcoords="offset points",
        fontsize=8.5,
        color="#444444",
    )
    words.set_in_layout(False)  # the pad of the title has made room for it
    return figure, panels


def _runs_in_words(configuration: Configuration) -> str:
    """Return the number of runs and their largest difference in a cell; '' for one run."""
    ok = configuration.rows[configuration.rows.status == "ok"]
    runs = ok.folder.nunique()
    if runs < 2:
        return ""
    times = ok.groupby(["provider", "b"]).median_us
    apart = (times.max() / times.min() - 1).max()
    return f"; {runs} runs, up to {apart:.0%} apart in a cell"


def draw_all(
    axes: Axes,
    configuration: Configuration,
    styles: Styles,
    points: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]],
) -> None:
    """Draw a line per provider; in the legend fused samplers come first, lower bounds last."""
    measured = configuration.measured.sort_values("b")
    order = {configuration.drawn: 1, Kind.LOWER_BOUND: 3}
    fused = configuration.providers(configuration.drawn, fused=True)
    for provider in sorted(
        configuration.providers(),
        key=lambda name: 0 if name in fused else order.get(styles[name].kind, 2),
    ):
        style = styles[provider]
        note = "" if style.kind is configuration.drawn else f"{style.kind}: "
        label = NOTES.get(style.kind, note) + configuration.label(provider)
        x, y = points(measured[measured.provider == provider])
        if style.kind is Kind.LOWER_BOUND and len(x) == 1:
            axes.axhline(y.iloc[0], label=label, **style.line)  # one point is no line
        else:
            axes.plot(x, y, label=label, **style.line)


def batch_axis(axes: Axes, configuration: Configuration) -> None:
    """Label the x axis with the powers of two of B."""
    log2_axis(axes, configuration.measured.b.unique(), "Batch size B (rows), log scale")


def log2_axis(axes: Axes, values: Iterable[int], label: str) -> None:
    """Set a logarithmic x axis, with ticks at the powers of two among the values, or at all."""
    marked = sorted(set(values))
    marked = [value for value in marked if value & (value - 1) == 0] or marked
    axes.set_xscale("log", base=2)
    axes.set_xticks(marked, [str(value) for value in marked])
    axes.xaxis.set_minor_locator(ticker.NullLocator())
    axes.set_xlabel(label)


def in_words(figure: Figure, words: str) -> None:
    """Write a subtitle above all panels."""
    figure.suptitle(words, fontsize=8.5, color="#444444")


def with_bars(
    axes: Axes, x: pd.Index, value: pd.Series, low: pd.Series, high: pd.Series, **look: Any
) -> None:
    """Draw a line with intervals; `look` are keyword arguments of Axes.errorbar."""
    bars = (value - low, high - value)
    axes.errorbar(x, value, yerr=bars, capsize=2.5, elinewidth=1.0, **look)


def plain_log_ticks(axis: Axis) -> None:
    """Set at least three ticks with plain numbers on a logarithmic axis."""
    low, high = axis.get_view_interval()
    decades = math.log10(high / low)
    if decades < 0.3:
        axis.set_major_locator(ticker.AutoLocator())
    else:
        steps = (
            (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8) if decades < 1 else (1, 2, 5) if decades < 2 else (1,)
        )
        axis.set_major_locator(ticker.LogLocator(base=10, subs=steps))
    if decades < 2:
        axis.set_minor_locator(ticker.NullLocator())
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_major_formatter(PLAIN)


def legend(figure: Figure, *panels: Axes, offset: float = 1.03) -> None:
    """Draw one legend for all panels, in the grid's empty cell or right of the last panel.

    The height of the figure grows to fit the legend.
    """
    entries = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    lines = sum(1 + label.count("\n") for label in entries)
    empty = [axes for axes in figure.axes if not axes.axison]
    share = 1.0
    if empty and (cell := empty[0].get_subplotspec()):
        heights = np.asarray(cell.get_gridspec().get_height_ratios(), dtype=float)
        share = float(heights[-1] / heights.sum())
    figure.set_figheight(max(figure.get_figheight(), (0.6 + 0.2 * lines) / share))
    placed = (empty or panels[-1:])[0].legend(
        list(entries.values()),
        list(entries),
        loc="upper left",
        bbox_to_anchor=(0 if empty else offset, 1),
        borderaxespad=0,
    )
    placed.set_in_layout(not empty)  # an empty cell has room for it
