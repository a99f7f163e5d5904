"""Figures of one configuration by B: time, speedup, bandwidth, kernels, energy, memory.

The input is a `tables.Configuration` (rows of results.csv), so a figure needs no GPU and no torch.
"""

from __future__ import annotations

from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from fsbench.provider import Kind
from fsbench.records import iomodel
from fsbench.records.stats import LEVEL
from fsbench.report.figures.parts import (
    PLAIN,
    Styles,
    batch_axis,
    draw_all,
    laid_out,
    legend,
    panel_row,
    percent_axis,
    plain_log_ticks,
    with_bars,
)
from fsbench.report.figures.style import ROOFS
from fsbench.report.logits_store import overhead, pair
from fsbench.report.tables import Configuration


@laid_out
def runtime(configuration: Configuration, styles: Styles) -> Figure:
    figure, (axes,) = panel_row(configuration, ["Time per decode step"])
    draw_all(axes, configuration, styles, lambda rows: (rows.b, rows.median_us))
    axes.set_yscale("log")
    plain_log_ticks(axes.yaxis)
    axes.set_ylabel("Median time (µs), log scale")
    batch_axis(axes, configuration)
    legend(figure, axes)
    return figure


def speedups(configuration: Configuration) -> dict[str, dict[str, pd.DataFrame]]:
    """Return {fused sampler: {unfused sampler: speedup by B}} for pairs measured in one run."""
    kind = Kind.SCORE if configuration.drawn is Kind.SCORE else Kind.EXACT
    unfused = configuration.providers(kind, fused=False)
    tables = {}
    for fused in configuration.providers(kind, fused=True):
        ratios = {other: configuration.ratio(other, fused) for other in unfused}
        tables[fused] = {other: ratio for other, ratio in ratios.items() if not ratio.empty}
    return {fused: ratios for fused, ratios in tables.items() if ratios}


@laid_out
def speedup(configuration: Configuration, styles: Styles) -> Figure | None:
    """Draw the paper's Figure 2: a panel for each fused sampler, a line for each unfused one."""
    panels = speedups(configuration)
    if not panels:
        return None
    figure, all_axes = panel_row(
        configuration, [f"Speedup of {configuration.label(fused)}" for fused in panels]
    )
    for axes, ratios in zip(all_axes, panels.values(), strict=True):
        for other, ratio in ratios.items():
            label = f"vs {configuration.label(other)}"
            with_bars(
                axes,
                ratio.index,
                ratio.value,
                ratio.lo,
                ratio.hi,
                label=label,
                **styles[other].line,
            )
        axes.axhline(1, color="#444444", linewidth=1.2, zorder=2.5)
        batch_axis(axes, configuration)
    all_axes[0].set_ylabel(f"Ratio of median times, {LEVEL:.0%} interval\n(> 1: fused is faster)")
    legend(figure, *all_axes)
    return figure


@laid_out
def bandwidth(configuration: Configuration, styles: Styles) -> Figure:
    """Draw the paper's Figure 6, right: bytes that a fused step must move / median time."""
    figure, (axes,) = panel_row(configuration, ["Bandwidth utilization"])
    draw_all(axes, configuration, styles, lambda rows: (rows.b, rows.gb_per_s))
    roofs = _roofs(configuration)
    for roof, style in zip(roofs, ROOFS, strict=False):
        label = f"peak, {roof.source}:\n{roof.tb_per_s:g} TB/s"
        axes.axhline(1e3 * roof.tb_per_s, label=label, **style)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(PLAIN)
    axes.set_ylabel("Bytes of the fused step / median time (GB/s)")
    if roofs:
        percent_axis(axes, 1e3 * roofs[0].tb_per_s, f"% of {roofs[0].source} bandwidth")
    batch_axis(axes, configuration)
    legend(figure, axes, offset=1.16 if roofs else 1.03)
    return figure


@laid_out
def breakdown(configuration: Configuration, styles: Styles) -> Figure | None:
    """Draw the paper's Figure 4 and Table 1: kernel time of sampling and matmul."""
    if "matmul_us" not in configuration.rows:
        return None
    rows = configuration.rows
    split = Configuration(configuration.stem, rows[rows.matmul_us.notna()])
    if not (split.measured.kind != Kind.LOWER_BOUND).any():
        return None
    titles = ["Sampling", "Matmul", "Share of sampling"]
    figure, (sampling, matmul, share) = panel_row(split, titles, sharey=False)
    # A difference of two kernel times can be 0 or less, which a logarithmic axis cannot show.
    draw_all(sampling, split, styles, lambda r: (r.b, r.sampling_us.where(r.sampling_us > 0)))
    draw_all(matmul, split, styles, lambda r: (r.b, r.matmul_us))
    draw_all(share, split, styles, lambda r: (r.b, 100 * _sampling_share(r)))
    for axes in (sampling, matmul):
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)
        axes.set_ylabel("Time in kernels (µs), log scale")
    share.set_ylabel("Sampling / time in all kernels (%)")
    for axes in (sampling, matmul, share):
        batch_axis(axes, split)
    for form, rows in split.measured.groupby("split_by"):
        if form != "names":
            labels = ",\n".join(map(split.label, rows.provider.unique()))
            share.plot([], [], " ", label=f"by difference to its {form} form:\n{labels}")
    legend(figure, share)
    return figure


def _sampling_share(rows: pd.DataFrame) -> pd.Series:
    return rows.sampling_us / (rows.matmul_us + rows.sampling_us + rows.other_us)


@laid_out
def costs(configuration: Configuration, styles: Styles) -> Figure | None:
    """Draw the energy and the peak memory of samplers."""
    panels = {
        "Energy": ("j_per_token", "Joules per step of B tokens, log scale"),
        "Peak extra memory": ("peak_extra_bytes", "MB beyond weight and hidden, log scale"),
    }
    parts = {title: _above_zero(configuration, column) for title, (column, _) in panels.items()}
    if not any(parts.values()):
        return None
    figure, all_axes = panel_row(configuration, list(panels), sharey=False)
    for axes, (title, (column, label)) in zip(all_axes, panels.items(), strict=True):
        axes.set_ylabel(label)
        batch_axis(axes, configuration)
        part = parts[title]
        if part is None:
            axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center")
            axes.set_yticks([])
            continue
        draw_all(axes, part, styles, partial(_cost, column))
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)
    legend(figure, *all_axes)
    return figure


def _cost(column: str, rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    cost = rows[column].astype(float)
    if column == "j_per_token":  # per token, differences vanish over two decades of B
        cost *= rows.b
    return rows.b, cost / 1e6 if column == "peak_extra_bytes" else cost


def _above_zero(configuration: Configuration, column: str) -> Configuration | None:
    """Return the rows with a column above 0, or None without such rows."""
    rows = configuration.rows
    if column not in rows:
        return None
    part = Configuration(configuration.stem, rows[pd.to_numeric(rows[column]) > 0])
    return None if part.measured.empty else part


@laid_out
def logits_store(configuration: Configuration, styles: Styles) -> Figure | None:
    """Draw the paper's Table 9: time that storing the logits adds, measured and predicted."""
    table = overhead(configuration)
    if table.empty:
        return None
    figure, (axes,) = panel_row(configuration, ["Storing the logits from the fused kernel"])
    fused, stored = pair()
    axes.plot(table.index, table.predicted_pct, label="predicted: 2B/D", **ROOFS[0])
    label = f"{configuration.label(stored)}\nover {configuration.label(fused)}"
    columns = (table[name] for name in ("measured_pct", "lo_pct", "hi_pct"))
    with_bars(axes, table.index, *columns, label=label, **styles[stored].line)
    published = table.paper_pct.dropna()
    if len(published):
        (points,) = axes.plot(published.index, published, "s", label="paper, on a B200")
        points.set(color=ROOFS[0]["color"], markerfacecolor="white")
    axes.set_ylabel(f"Time added, {LEVEL:.0%} interval (%)")
    batch_axis(axes, configuration)
    legend(figure, axes)
    return figure


def _roofs(configuration: Configuration) -> list[iomodel.Roof]:
    """Return the peaks of the GPU: datasheet, then measured; [] for an unknown GPU."""
    gpu = iomodel.find_gpu(configuration.rows.gpu.iloc[0])
    return [roof for roof in (gpu.datasheet, gpu.measured) if roof] if gpu else []
