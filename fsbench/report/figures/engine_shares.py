"""The LM head's and the sampler's share of an engine's step, by kind of request and B."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fsbench.provider import Kind
from fsbench.report.figures.parts import in_words, laid_out, legend
from fsbench.report.figures.style import styles

_MATMUL = "#b8b8b8"
_BAR = 0.8
"""Height of all bars of a case together; cases are 1 apart."""


@laid_out
def draw(rows: pd.DataFrame) -> Figure | None:
    """Draw one engine, a panel per model; return None if no profile has the parts.

    Each case has a bar for each sampler: percent of the GPU's time in a step that is not spent in
    the layers. The LM head's matmul is gray where it is a separate kernel; in a fused sampler its
    time cannot be separated from that of sampling.
    """
    profiled = rows[rows.draw_us.notna() & rows.rest_us.notna()]
    if profiled.empty:
        return None
    look = styles(profiled.assign(provider=profiled.sampler, kind=str(Kind.EXACT)))
    models = list(profiled.groupby(["model", "tp"], sort=False))
    samplers = list(profiled.sampler.unique())
    height = _BAR / len(samplers)
    most = max(len(of_model.groupby(["requests", "b"])) for _, of_model in models)
    figure = Figure(
        figsize=(3.4 + 3.4 * len(models), 1.2 + 0.14 * most * max(2, len(samplers))),
        layout="constrained",
    )
    panels = figure.subplots(1, len(models), squeeze=False)[0]
    for panel, ((model, tp), of_model) in zip(panels, models, strict=True):
        cases = list(of_model.groupby(["requests", "b"], sort=False))
        for place, (_, case) in enumerate(cases):
            for row in case.itertuples():
                y = place - _BAR / 2 + height * (samplers.index(row.sampler) + 0.5)
                _draw_bar(panel, row, y, height, look[row.sampler].line["color"])
        panel.set_yticks(range(len(cases)), [f"{kind}, B = {b}" for (kind, b), _ in cases])
        panel.set_ylim(len(cases) - 0.5, -0.5)
        panel.set_axisbelow(True)
        panel.grid(axis="y", visible=False)
        panel.set_title(f"{model}, TP {tp}")
        panel.set_xlabel("Share of the GPU's time in a step (%)")
    first = profiled.iloc[0]
    in_words(figure, f"{first.engine}, {first.gpu or 'CPU'}; random weights, {first['dtype']}")
    legend(figure, *panels)
    return figure


def _draw_bar(panel: Axes, row: Any, y: float, height: float, color: str) -> None:
    """Draw the bar of one sampler: the LM head's matmul, if it was profiled, then the rest."""
    step = row.draw_us + row.rest_us
    matmul = 0.0 if pd.isna(row.matmul_us) else row.matmul_us
    of_matmul, of_rest = 100 * matmul / step, 100 * (row.draw_us - matmul) / step
    label = row.label if matmul else f"{row.label}: LM head and sampling"
    panel.barh(y, of_matmul, height, color=_MATMUL, label="LM head's matmul")
    panel.barh(y, of_rest, height, left=of_matmul, color=color, label=label)
