"""Figures of what `fsbench hotvocab` measured, from its tables; no torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fsbench.report.figures.parts import laid_out, log2_axis
from fsbench.simple import sizing
from fsbench.simple.hot import Coverage

_BLUE, _RED, _GREEN, _GREY = "#0072B2", "#D55E00", "#009E73", "#6e6e6e"  # Okabe and Ito
_DESIGNS = {"full-V port": _GREY, "sequence-parallel": _BLUE, "offloaded": _GREEN, "SHVS": _RED}


def _figure(panels: int, title: str) -> tuple[Figure, list[Any]]:
    figure = Figure(figsize=(min(3.6 * panels, 8.4) + 0.4, 3.2), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=9.5)
    return figure, [figure.add_subplot(1, panels, 1 + i) for i in range(panels)]


@laid_out
def ablation(steps: pd.DataFrame, title: str) -> Figure:
    """Rows per second of one sampler in the four designs, log scale (the paper's Figure 10)."""
    groups = list(steps.groupby("controls", sort=False))
    figure, all_axes = _figure(len(groups), title)
    for axes, (controls, rows) in zip(all_axes, groups, strict=True):
        bars = axes.bar(rows.design, rows.rows_per_s, color=[_DESIGNS[d] for d in rows.design])
        axes.bar_label(bars, [f"{value:,.0f}" for value in rows.rows_per_s], fontsize=8)
        axes.set_yscale("log")
        axes.set_ylim(steps.rows_per_s.min() / 3, steps.rows_per_s.max() * 3)
        axes.grid(False, axis="x")
        axes.set_axisbelow(True)
        axes.tick_params("x", rotation=20)
        axes.set_title({"plain": "no filters, no penalties"}.get(controls, "all controls on"))
        axes.set_ylabel("rows per second of one\nsampler, log scale")
    return figure


@laid_out
def sized(scans: pd.DataFrame, cover: Coverage, cost: sizing.Cost, title: str) -> Figure:
    """Cost of a scan, coverage, and predicted against measured throughput (Figure 11)."""
    figure, (scan, share, speed) = _figure(3, title)
    H = np.geomspace(scans.h.min(), cover.V, 300)
    scan.plot(scans.h, scans.settled_us, "o", color=_BLUE, label="measured")
    scan.plot(H, cost.scan_us(H), color=_GREY, label="c H + c0")
    scan.set_ylabel("hot path (µs per row), log scale")
    scan.set_title("Cost of the hot path")
    scan.set_yscale("log")
    share.plot(H, cover.at(H), color=_GREY, label="mean")
    share.plot(cover.sizes, cover.low, ":", color=_RED, label="10th percentile of documents")
    share.plot(scans.h, scans.hits, "o", color=_BLUE, label="rows that hit, measured")
    share.set_ylim(0, 1.02)
    share.set_title("Share of tokens that are hot")
    speed.plot(scans.h, 1e6 / scans.row_us, "o-", color=_BLUE, label="measured")
    for both, label, style in ((False, "1 / F", ":"), (True, "1 / F2", "-")):
        speed.plot(
            H, 1e6 / sizing.expected_us(H, cover, cost, both), style, color=_GREY, label=label
        )
    speed.axvline(sizing.best(cover, cost, True).H, color=_RED, linewidth=1, label="H*")
    speed.set_ylabel("rows per second")
    speed.set_ylim(bottom=0)
    speed.set_title("Throughput of one sampler")
    for axes in (scan, share, speed):
        axes.set_xscale("log")
        axes.set_xlabel("H, hot tokens, log scale")
        axes.legend()
    return figure


@laid_out
def scaled(scaling: pd.DataFrame, title: str) -> Figure:
    """Rows per second by number of samplers."""
    figure, (axes,) = _figure(1, title)
    for design, rows in scaling.groupby("design"):
        color = _DESIGNS[design]
        axes.plot(rows.samplers, rows.rows_per_s, "o-", color=color, label=design)
        ideal = rows.rows_per_s.iloc[0] * rows.samplers / rows.samplers.iloc[0]
        axes.plot(rows.samplers, ideal, ":", color=color)
    log2_axis(axes, scaling.samplers, "samplers, log scale")
    axes.set_yscale("log")
    axes.set_ylabel("rows per second, log scale")
    axes.set_title("Scaling (dotted: linear)")
    axes.legend()
    return figure


@laid_out
def exposed(overlap: pd.DataFrame, title: str) -> Figure:
    """Time per step that sampling on the CPU adds to a GPU's, by B."""
    figure, (axes,) = _figure(1, title)
    for design, rows in overlap.groupby("design"):
        color = _DESIGNS[design]
        axes.plot(rows.b, rows.exposed_serial_us, "o:", color=color, label=f"{design}, serial")
        axes.plot(
            rows.b, rows.exposed_overlapped_us, "o-", color=color, label=f"{design}, overlapped"
        )
    log2_axis(axes, overlap.b, "B, log scale")
    axes.set_yscale("symlog", linthresh=10)
    axes.set_ylabel("exposed time (µs per step),\nlog scale beyond ± 10")
    axes.legend()
    return figure
