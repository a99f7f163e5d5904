"""Time per output token by B, one panel per model, as in the paper's Figure 5."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from fsbench.provider import Kind
from fsbench.report.figures import engine_shares
from fsbench.report.figures.parts import in_words, laid_out, legend, log2_axis, save
from fsbench.report.figures.style import styles

ACROSS = 3
"""Most panels in a row."""

LARGEST_DEVIATION = 2.0
"""Savings whose standard deviation over runs exceeds this, in percent, are not drawn."""

NAMES = ("tpot", "share")
"""Figures of engines."""


def draw_engines(
    frame: pd.DataFrame, names: Collection[str] = NAMES
) -> Iterator[tuple[str, str, Figure]]:
    """Yield (name, engine, figure) for each name and each engine that has times.

    frame is an fsbench.e2e.summary, and names are among NAMES; no other figure is drawn.
    The share is left out where no profile has the parts of a step.
    """
    measured = frame[frame.runs > 0]
    for engine, rows in measured.groupby("engine", sort=False):
        if "tpot" in names:
            yield "tpot", str(engine), draw(rows)
        if "share" in names and (shares := engine_shares.draw(rows)) is not None:
            yield "share", str(engine), shares


def write_figures(frame: pd.DataFrame, folder: Path) -> list[Path]:
    """Write the figures of each engine as PNG; return the paths."""
    written = []
    for name, engine, figure in draw_engines(frame):
        written.append(folder / f"{name}_{engine}.png")
        save(figure, written[-1])
    return written


@laid_out
def draw(rows: pd.DataFrame) -> Figure:
    """Draw one engine: medians over runs, with bars from the lowest run to the highest.

    The panel below shows the share of the baseline's time that is saved, where runs agree
    (LARGEST_DEVIATION), and Amdahl's bound: the share saved if sampling took no time.
    """
    look = styles(rows.assign(provider=rows.sampler, kind=str(Kind.EXACT)))
    models = list(rows.groupby(["model", "tp", "requests"], sort=False))
    across = min(len(models), ACROSS)
    lines = -(-len(models) // across)
    figure = Figure(
        figsize=(1.6 + (3.2 if across < ACROSS else 2.4) * across, 5.6 * lines),
        layout="constrained",
    )
    grid = figure.subplots(2 * lines, across, squeeze=False, height_ratios=(3, 2) * lines)
    panels = grid.reshape(lines, 2, across).swapaxes(1, 2).reshape(-1, 2)
    for panel in panels[len(models) :].flat:
        panel.set_axis_off()  # an invisible one would hide the legend
    for (upper, lower), ((model, tp, requests), of_model) in zip(panels, models, strict=False):
        for sampler, line in of_model.groupby("sampler", sort=False):
            ordered = line.sort_values("b")
            style = look[str(sampler)].line
            spread = [
                ordered.tpot_ms - ordered.tpot_min_ms,
                ordered.tpot_max_ms - ordered.tpot_ms,
            ]
            upper.errorbar(
                ordered.b, ordered.tpot_ms, yerr=spread, label=ordered.label.iloc[0], **style
            )
            if not ordered.baseline.iloc[0]:
                steady = ordered[~(ordered.reduction_sd_pct > LARGEST_DEVIATION)]
                lower.errorbar(
                    steady.b, steady.reduction_pct, yerr=steady.reduction_sd_pct, **style
                )
        bound = of_model[of_model.baseline].sort_values("b")
        if bound.amdahl_pct.notna().any():
            lower.plot(
                bound.b,
                bound.amdahl_pct,
                ":",
                color="#444444",
                label="bound: sampling in no time,\nthe same matmul",
            )
        lower.axhline(0, color="#444444", linewidth=0.8)
        log2_axis(upper, of_model.b, "")
        log2_axis(lower, of_model.b, "Requests at a time, log scale")
        kind = "" if requests == "plain" else f", {requests}"
        upper.set_title(f"{model}, TP {tp}{kind}")
        upper.tick_params(labelbottom=False)
        upper.set_ylim(0, 1.08 * of_model.tpot_max_ms.max())  # no marker at the edge
    for upper, lower in panels[::across]:
        upper.set_ylabel("Time per output token (ms)\nbars: lowest to highest run")
        lower.set_ylabel("Saved (%)\nbars: ± 1 standard deviation,\nnot drawn above 2 %")
    first = rows.iloc[0]
    in_words(figure, f"{first.engine}, {first.gpu or 'CPU'}; random weights, {first['dtype']}")
    legend(figure, *panels[:, 1], *panels[:, 0])
    return figure
