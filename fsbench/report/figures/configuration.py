"""The figures of one configuration against B: times, speedups, roofs, kernels, other costs.

Input is a `tables.Configuration` (rows of results.csv), so a figure needs no GPU and no torch.
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
    """Fused sampler, or score -> unfused one -> speedup over it by B; only what was measured."""
    kind = Kind.SCORE if configuration.drawn is Kind.SCORE else Kind.EXACT
    unfused = configuration.providers(kind, fused=False)
    found = {}
    for fused in configuration.providers(kind, fused=True):
        ratios = {other: configuration.ratio(other, fused) for other in unfused}
        found[fused] = {other: ratio for other, ratio in ratios.items() if not ratio.empty}
    return {fused: ratios for fused, ratios in found.items() if ratios}


@laid_out
def speedup(configuration: Configuration, styles: Styles) -> Figure | None:
    """Paper Figure 2: one panel per fused sampler, one line per unfused exact one."""
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
def roofline(configuration: Configuration, styles: Styles) -> Figure:
    """Paper Figure 6, left: FLOP/s of the matmul against the intensity of the fused step."""
    figure, (axes,) = panel_row(configuration, ["Roofline"])
    intensity = {
        B: iomodel.arithmetic_intensity(configuration.problem(B)).fused
        for B in sorted(configuration.measured.b.unique())
    }
    roofs = _roofs(configuration)

    def points(rows: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
        x, y = rows.b.map(intensity), rows.tflops
        if roofs and (rows.kind == Kind.LOWER_BOUND).all():
            # A bound that does no matmul, such as reading W, is faster than any matmul can be.
            y = y.where(y <= x.map(roofs[0].tflops_at))
        return x, y

    draw_all(axes, configuration, styles, points)
    span = [min(intensity.values()) / 1.5, max(intensity.values()) * 1.5]
    for roof, style in zip(roofs, ROOFS, strict=False):
        ridge = min(max(roof.tflops / roof.tb_per_s, span[0]), span[1])
        x = [span[0], ridge, span[1]]
        label = f"roof, {roof.source}:\n{roof.tb_per_s:g} TB/s, {roof.tflops:g} TFLOP/s"
        axes.plot(x, [roof.tflops_at(point) for point in x], label=label, **style)
    axes.set(xscale="log", yscale="log", xlim=span)
    axes.set_xlabel("Arithmetic intensity of the fused step (FLOP/byte), log scale")
    axes.set_ylabel("Matmul rate, 2BDV / median time (TFLOP/s), log scale")
    plain_log_ticks(axes.xaxis)
    plain_log_ticks(axes.yaxis)
    legend(figure, axes)
    return figure


@laid_out
def bandwidth(configuration: Configuration, styles: Styles) -> Figure:
    """Paper Figure 6, right: bytes no exact sampler can avoid, per second, against B."""
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
    """Paper Figure 4 and Table 1: kernel time of sampling and of the matmul, and their share."""
    if "matmul_us" not in configuration.rows:
        return None
    rows = configuration.rows
    split = Configuration(configuration.stem, rows[rows.matmul_us.notna()])
    if not (split.measured.kind != Kind.LOWER_BOUND).any():
        return None
    titles = ["Sampling", "Matmul", "Share of sampling"]
    figure, (sampling, matmul, share) = panel_row(split, titles, sharey=False)
    # A difference of two times of kernels may be 0 or less, which has no place on this axis.
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
    """What a sampler costs beside time: energy, memory, and the first call."""
    panels = {
        "Energy": ("j_per_token", "Joules per step of B tokens, log scale"),
        "Peak extra memory": ("peak_extra_bytes", "MB beyond weight and hidden, log scale"),
        "First call": ("first_call_s", _first_call_label(configuration)),
    }
    known = {title: _known(configuration, column) for title, (column, _) in panels.items()}
    if not any(known.values()):
        return None
    figure, all_axes = panel_row(configuration, list(panels), sharey=False)
    for axes, (title, (column, label)) in zip(all_axes, panels.items(), strict=True):
        axes.set_ylabel(label)
        batch_axis(axes, configuration)
        part = known[title]
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
    if column == "j_per_token":  # spans two decades of B, in which samplers look alike
        cost *= rows.b
    return rows.b, cost / 1e6 if column == "peak_extra_bytes" else cost


def _first_call_label(configuration: Configuration) -> str:
    """That first calls are of a process whose compilers had caches on disk, if all are."""
    warm = configuration.measured.get("warm", pd.Series(dtype=object)).fillna("")
    caches = "\ncaches of the compilers warm" if len(warm) and (warm != "").all() else ""
    return f"Build and first step (s), log scale{caches}"


def _known(configuration: Configuration, column: str) -> Configuration | None:
    """The rows in which a column has a number above 0; None if there are none."""
    rows = configuration.rows
    if column not in rows:
        return None
    part = Configuration(configuration.stem, rows[pd.to_numeric(rows[column]) > 0])
    return None if part.measured.empty else part


@laid_out
def logits_store(configuration: Configuration, styles: Styles) -> Figure | None:
    """Paper Table 9: what storing the logits adds, and the line that the I/O model predicts."""
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
    """Datasheet roof, then the measured one; empty for a GPU whose peaks are unknown."""
    gpu = iomodel.find_gpu(configuration.rows.gpu.iloc[0])
    return [roof for roof in (gpu.datasheet, gpu.measured) if roof] if gpu else []
