"""The figures of one configuration: runtime, speedup, roofline and bandwidth against B.

Input is a `tables.Configuration` (rows of results.csv), so a figure needs no GPU and no torch.
Figures are matplotlib Figure objects without pyplot: no global state, no display.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsbench import iomodel
from fsbench.errors import ResultsError, unknown_name
from fsbench.plotstyle import ROOFS, SETTINGS, Style
from fsbench.problem import Problem
from fsbench.provider import Kind
from fsbench.stats import LEVEL
from fsbench.tables import Configuration

# Without these entries a file would carry its date or a version, and differ at every run.
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None},
}

Styles = dict[str, Style]


def check_formats(names: Iterable[str]) -> list[str]:
    """The file formats asked for, each once; an unknown one raises InvalidArgument."""
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in _METADATA:
            raise unknown_name("--format", name, _METADATA)
    return chosen


def figures(configuration: Configuration, styles: Styles) -> dict[str, Figure]:
    """The figures of a configuration by name; 'speedup' only if there is something to compare."""
    with mpl.rc_context(SETTINGS):
        drawn = {
            "runtime": _runtime(configuration, styles),
            "speedup": _speedup(configuration, styles),
            "roofline": _roofline(configuration, styles),
            "bandwidth": _bandwidth(configuration, styles),
        }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def save(figure: Figure, path: Path) -> None:
    """Write a figure in the format of the path's suffix, whole or not at all.

    The same figure gives the same bytes. Raises ResultsError where the path cannot be written.
    """
    file_format = path.suffix.removeprefix(".")
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with mpl.rc_context(SETTINGS):
            figure.savefig(temporary, format=file_format, metadata=_METADATA[file_format])
        os.replace(temporary, path)
    except OSError as error:
        raise ResultsError(f"cannot write figure {path}: {error.strerror}") from error


def _runtime(configuration: Configuration, styles: Styles) -> Figure:
    figure, axes = _figure(configuration, "Time per decode step")
    _draw_all(axes, configuration, styles, lambda rows: (rows.b, rows.median_us))
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(mpl.ticker.LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.10g}"))
    axes.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
    axes.set_ylabel("Median time (us)")
    _batch_axis(axes, configuration)
    _legend(figure, axes)
    return figure


def _speedup(configuration: Configuration, styles: Styles) -> Figure | None:
    """Paper Figure 2: one panel per fused sampler, one line per unfused exact one."""
    panels = {
        fused: {
            other: ratio
            for other in configuration.providers(Kind.EXACT, fused=False)
            if not (ratio := configuration.ratio(other, fused)).empty
        }
        for fused in configuration.providers(Kind.EXACT, fused=True)
    }
    panels = {fused: ratios for fused, ratios in panels.items() if ratios}
    if not panels:
        return None
    figure = Figure(figsize=(3.4 + 3.9 * len(panels), 3.8), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, (fused, ratios) in zip(all_axes, panels.items(), strict=True):
        for other, ratio in ratios.items():
            axes.errorbar(
                ratio.index,
                ratio.value,
                yerr=(ratio.value - ratio.lo, ratio.hi - ratio.value),
                label=f"vs {configuration.label(other)}",
                capsize=2.5,
                elinewidth=1.0,
                **styles[other].line,
            )
        axes.axhline(1, color="#444444", linewidth=1.0, zorder=1)
        axes.set_title(f"Speedup of {configuration.label(fused)}", fontweight="bold")
        _batch_axis(axes, configuration)
    all_axes[0].set_ylabel(f"Ratio of median times, {LEVEL:.0%} interval\n(> 1: fused is faster)")
    figure.suptitle(_subtitle(configuration), x=0.01, ha="left", fontsize=8.5, color="#444444")
    handles = {
        label: handle
        for axes in all_axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure


def _roofline(configuration: Configuration, styles: Styles) -> Figure:
    """Paper Figure 6, left: FLOP/s of the matmul against the intensity of the fused step."""
    figure, axes = _figure(configuration, "Roofline")
    rows = configuration.measured
    intensity = {B: _intensity(rows[rows.b == B].iloc[0]) for B in sorted(rows.b.unique())}
    span = [min(intensity.values()) / 1.5, max(intensity.values()) * 1.5]
    for roof, style in zip(_roofs(configuration), ROOFS, strict=False):
        ridge = roof.tflops / roof.tb_per_s
        x = sorted({*span, min(max(ridge, span[0]), span[1])})
        label = f"{roof.source}: {roof.tb_per_s:g} TB/s, {roof.tflops:g} TFLOP/s"
        axes.plot(x, [roof.tflops_at(point) for point in x], label=label, **style)
    _draw_all(axes, configuration, styles, lambda rows: (rows.b.map(intensity), rows.tflops))
    axes.set(xscale="log", yscale="log", xlim=span)
    axes.set_xlabel("Arithmetic intensity of the fused step (FLOP/byte)")
    axes.set_ylabel("Matmul rate, 2BDV / median time (TFLOP/s)")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(mpl.ticker.StrMethodFormatter("{x:,.10g}"))
        axis.set_minor_formatter(mpl.ticker.NullFormatter())
    _legend(figure, axes)
    return figure


def _bandwidth(configuration: Configuration, styles: Styles) -> Figure:
    """Paper Figure 6, right: bytes no exact sampler can avoid, per second, against B."""
    figure, axes = _figure(configuration, "Bandwidth utilisation")
    _draw_all(axes, configuration, styles, lambda rows: (rows.b, rows.gb_per_s))
    roofs = _roofs(configuration)
    for roof, style in zip(roofs, ROOFS, strict=False):
        label = f"{roof.source}: {roof.tb_per_s:g} TB/s"
        axes.axhline(1e3 * roof.tb_per_s, label=label, **style)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("Bytes of the fused step / median time (GB/s)")
    if roofs:
        peak = 1e3 * roofs[0].tb_per_s

        def to_percent(gb_per_s: Any) -> Any:
            return 100 * gb_per_s / peak

        def from_percent(percent: Any) -> Any:
            return percent * peak / 100

        right = axes.secondary_yaxis("right", functions=(to_percent, from_percent))
        right.set_ylabel(f"% of {roofs[0].source} bandwidth")
    _batch_axis(axes, configuration)
    _legend(figure, axes)
    return figure


def _figure(configuration: Configuration, what: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.3, 3.8), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(what, x=0.01, ha="left", fontsize=10.5, fontweight="bold")
    axes.set_title(_subtitle(configuration), fontsize=8.5, color="#444444")
    return figure, axes


def _subtitle(configuration: Configuration) -> str:
    return f"{configuration.title}\n{configuration.conditions}"


def _draw_all(
    axes: Axes,
    configuration: Configuration,
    styles: Styles,
    points: Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]],
) -> None:
    """One line per provider: fused samplers first in the legend, lower bounds last."""
    measured = configuration.measured.sort_values("b")
    order = {Kind.EXACT: 1, Kind.LOWER_BOUND: 3}
    fused = configuration.providers(Kind.EXACT, fused=True)
    for provider in sorted(
        configuration.providers(),
        key=lambda name: 0 if name in fused else order.get(styles[name].kind, 2),
    ):
        style = styles[provider]
        note = "" if style.kind is Kind.EXACT else f" ({style.kind.replace('_', ' ')})"
        label = configuration.label(provider) + note
        x, y = points(measured[measured.provider == provider])
        if style.kind is Kind.LOWER_BOUND and len(x) == 1:
            axes.axhline(y.iloc[0], label=label, **style.line)  # one point is no line
        else:
            axes.plot(x, y, label=label, **style.line)


def _batch_axis(axes: Axes, configuration: Configuration) -> None:
    """B in powers of two, marked as plain numbers."""
    batches = sorted(configuration.measured.b.unique())
    powers = [B for B in batches if B & (B - 1) == 0]
    axes.set_xscale("log", base=2)
    axes.set_xticks(powers or batches, [str(B) for B in powers or batches])
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_xlabel("Batch size B (rows)")


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")


def _roofs(configuration: Configuration) -> list[iomodel.Roof]:
    """Datasheet roof, then the measured one; empty for a GPU whose peaks are unknown."""
    gpu = iomodel.find_gpu(configuration.rows.gpu.iloc[0])
    return [roof for roof in (gpu.datasheet, gpu.measured) if roof] if gpu else []


def _intensity(row: pd.Series) -> float:
    problem = Problem(int(row.b), int(row.d), int(row.v), row.dtype, tp=int(row.tp))
    return iomodel.arithmetic_intensity(problem).fused
