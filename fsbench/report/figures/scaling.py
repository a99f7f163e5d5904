"""Time by number of GPUs, one panel per batch size, as in the paper's Figure 3."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from fsbench.provider import Kind
from fsbench.report.figures.parts import (
    NOTES,
    grid,
    in_words,
    laid_out,
    legend,
    log2_axis,
    plain_log_ticks,
)
from fsbench.report.figures.style import Style
from fsbench.report.scaling import scaling_table
from fsbench.report.tables import Configuration, conditions_in_words


@laid_out
def draw(group: list[Configuration], styles: dict[str, Style]) -> Figure:
    """Draw a line per provider, and ideal scaling of the fastest on one GPU.

    Args:
        group: configurations that differ only in `tp` (scaling.over_ranks).
    """
    table = scaling_table(group)
    degrees = [int(each.rows.tp.iloc[0]) for each in group]
    batches = sorted(table.index.get_level_values("b").unique())
    figure, panels = grid(len(batches), 3)
    for axes, B in zip(panels, batches, strict=True):
        of_b = table.loc[B]
        for provider in of_b.index:
            times = of_b.loc[provider, [f"tp{n}_min_us" for n in degrees]].astype(float)
            label = NOTES.get(styles[provider].kind, "") + of_b.label[provider]
            axes.plot(degrees, times, label=label, **styles[provider].line)
        ideal = _ideal(of_b, styles, degrees)
        if ideal:
            axes.plot(
                degrees,
                ideal,
                ":",
                color="#444444",
                linewidth=1.4,
                label="ideal: the best exact TP = 1, over TP",
            )
        log2_axis(axes, degrees, "GPUs (TP), log scale")
        axes.set_yscale("log")
        plain_log_ticks(axes.yaxis)
        axes.set_title(f"B = {B}")
    first = group[0].rows.iloc[0]
    panels[0].set_ylabel("Least time of a step, slowest rank (µs), log scale")
    machine = f"{first.gpu_name or 'CPU'}, D = {first.d:,}, V = {first.v:,}"
    in_words(figure, f"{machine}; {conditions_in_words(first)}")
    legend(figure, *panels)
    return figure


def _ideal(of_b: pd.DataFrame, styles: dict[str, Style], degrees: list[int]) -> list[float]:
    """Return the fastest exact sampler's time on one GPU / n; [] if none was measured."""
    if "tp1_min_us" not in of_b:
        return []
    exact = [name for name in of_b.index if styles[name].kind is Kind.EXACT]
    least = of_b.tp1_min_us[exact].min()
    return [least / n for n in degrees] if pd.notna(least) else []
