"""Time / time of the matmul alone by B, a labeled line per group of samplers: README's figure."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation

from fsbench.provider import Kind
from fsbench.report import logits_store
from fsbench.report.figures.parts import laid_out, log2_axis
from fsbench.report.figures.style import EMPHASIZED, headline_color, samplers
from fsbench.report.tables import Configuration, stems

_WORDS = {
    "fused": "fused: {}",
    "screened": "fused: {}",
    "stored": "best that stores logits: {}",
    "flashinfer": "FlashInfer, the fastest at each B: {}",
    "vllm": "vLLM's own sampler: {}",
}

Lines = dict[str, tuple[str, pd.Series]]
"""Group -> (names of its samplers, time / time of the matmul by B)."""


def over_logits(configurations: list[Configuration]) -> dict[str, list[Configuration]]:
    """Group unfiltered configurations that differ only in the distribution of the logits.

    A group with graph replays leaves out its eager steps.
    """
    unfiltered = [each for each in configurations if each.drawn is Kind.EXACT]
    groups = stems(unfiltered, {"logits", "graph"})
    replays = {
        stem: [each for each in group if each.rows.graph.iloc[0]] for stem, group in groups.items()
    }
    return {stem: replays[stem] or group for stem, group in groups.items()}


@laid_out
def draw(group: list[Configuration]) -> Figure | None:
    """Draw the figure; return None if no run has a fused sampler, an unfused one and the matmul."""
    lines = _beside_fused(_lines(group))
    if not {"fused", "stored"} <= set(lines):
        return None
    return _figure(lines, group[0].title)


def _group(name: str, fused: bool) -> str:
    for word in ("flashinfer", "vllm"):
        if name.startswith(word):
            return word
    if "screened" in name:
        return "screened"
    return "fused" if fused else "stored"


def _lines(configurations: list[Configuration]) -> Lines:
    """Return the line of each group: the smallest ratio of its samplers at each B.

    Both times of a ratio are medians of one run. The label names each sampler that is the fastest
    at some B. Where the public call was measured, the line has its times. If several configurations
    have a group, the line is from the one with the public call, then with the most batch sizes,
    then with the smallest geometric mean.
    """
    _, with_store = logits_store.pair()
    call = samplers()["public_call"]
    best: dict[str, tuple[tuple[bool, int, float], str, pd.Series]] = {}
    for each in configurations:
        groups: dict[str, dict[str, pd.Series]] = {}
        for fused in (True, False):
            for name in each.providers(Kind.EXACT, fused=fused):
                ratio = _over_matmul(each, name)
                if name != with_store and not ratio.empty:
                    groups.setdefault(_group(name, fused), {})[name] = ratio
        for group, ratios in groups.items():
            table, as_called = pd.DataFrame(ratios), call in ratios
            least = table.min(axis=1)
            names = " or ".join(each.label(name) for name in table.idxmin(axis=1).unique())
            if as_called:
                names = each.label(call)
                if len(ratios[call]) < len(least):
                    names += ", or its faster kernel where only kernels were measured"
                least = ratios[call].combine_first(least)
            rank = (not as_called, -len(least), math.exp(least.map(math.log).mean()))
            if group not in best or rank < best[group][0]:
                best[group] = (rank, names, least)
    return {group: best[group][1:] for group in _WORDS if group in best}


def _beside_fused(lines: Lines) -> Lines:
    """Return the part of each line at the batch sizes of the fused one, if it is not empty."""
    if "fused" not in lines:
        return {}
    batches = lines["fused"][1].index
    parts = {
        group: (label, ratio[ratio.index.isin(batches)]) for group, (label, ratio) in lines.items()
    }
    return {group: part for group, part in parts.items() if len(part[1])}


def _over_matmul(each: Configuration, name: str) -> pd.Series:
    """Return the ratio to the tightest lower bound by B; a read of the weight is a looser bound."""
    ratios = [each.ratio(name, bound).value for bound in each.providers(Kind.LOWER_BOUND)]
    return min(ratios, key=lambda ratio: (-len(ratio), ratio.mean()), default=pd.Series())


def finding(lines: Lines) -> str:
    """Return the title: how much less time the fused sampler takes than the best alternative.

    The alternative at each B is the fastest line that stores logits.
    """
    _, fused = lines["fused"]
    stored = pd.DataFrame({group: lines[group][1] for group in lines if group not in EMPHASIZED})
    ratio = (fused / stored.min(axis=1)).dropna()
    faster = ratio[ratio < 1]
    low, high = (f"{100 * abs(1 - bound):.0f}" for bound in (ratio.max(), ratio.min()))
    rival = "the best that stores logits"
    if len(faster) == len(ratio):
        return f"Fused sampling takes {low} to {high} % less time than {rival}"
    if faster.empty:
        return f"Fused sampling is slower than {rival} at every batch size"
    points = f"{len(faster)} of {len(ratio)} batch sizes"
    return f"Fused sampling beats {rival} at {points}, by up to {high} %"


def _figure(lines: Lines, title: str) -> Figure:
    figure = Figure(figsize=(8.8, 4.4), layout="constrained")
    axes = figure.subplots()
    batches = sorted({B for _, ratio in lines.values() for B in ratio.index})
    for group, (_, ratio) in lines.items():
        emphasized = group in EMPHASIZED
        axes.plot(
            ratio.index,
            ratio,
            "o-",
            color=headline_color(group),
            linewidth=3.0 if emphasized else 1.6,
            markersize=3 if len(ratio) > 20 else 5,
            zorder=5 if emphasized else 4,
        )
    axes.axhline(1, color="#444444", linewidth=1.2, linestyle="--", zorder=1)
    log2_axis(axes, batches, "Batch size B (rows), log scale")
    axes.set_xlim(batches[0] * 0.85, batches[-1] * 1.12)
    low = min(ratio.min() for _, ratio in lines.values())
    axes.set_ylim(bottom=min(1.0, low) - 0.12)
    axes.set_ylabel("Time / time of the matmul alone\n(lower is better)", fontsize=10)
    axes.xaxis.label.set_fontsize(10)
    axes.tick_params(labelsize=10)
    axes.grid(False, axis="x")
    figure.suptitle(finding(lines), x=0.01, ha="left", fontsize=11, fontweight="bold")
    axes.set_title(title, fontsize=10, color="#444444")
    _name_lines(figure, lines)
    return figure


def _name_lines(figure: Figure, lines: Lines) -> None:
    """Label each line where the label covers neither a line nor another label.

    Labels of fused samplers go below the line if there is room; the others go above it.
    """
    axes = figure.axes[0]
    axes.annotate(
        "the matmul alone",
        xy=(1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=10,
        color="#444444",
    )
    if engine := figure.get_layout_engine():
        engine.execute(figure)  # places in pixels hold only in the final layout
    occupied = np.concatenate([_dense(line) for line in axes.lines])
    for group, (label, ratio) in lines.items():
        emphasized = group in EMPHASIZED
        text = axes.annotate(
            _WORDS[group].format(label),
            xy=(ratio.index[0], ratio.iloc[0]),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=10,
            color=headline_color(group),
            fontweight="bold" if emphasized else "normal",
        )
        best = None
        distances = (-7, 7, -22) if emphasized else (7, 22, 37, 52)
        for start, distance in product(range(len(ratio)), distances):
            _place(axes, text, ratio.iloc[start:], distance)
            covered = _covered(axes, text, occupied)
            if best is None or covered < best[0]:
                best = covered, start, distance
        assert best is not None
        _place(axes, text, ratio.iloc[best[1] :], best[2])
        box = text.get_window_extent()
        x, y = np.meshgrid(np.linspace(box.x0, box.x1, 100), np.linspace(box.y0, box.y1, 10))
        occupied = np.concatenate([occupied, np.stack([x.ravel(), y.ravel()], axis=1)])


def _place(axes: Axes, text: Annotation, ratio: pd.Series, distance: int) -> None:
    """Move a label above the start of a line, or below it if the distance is negative.

    The label clears the part of the line over which it extends.
    """
    text.set_position((-3, distance))
    text.set_verticalalignment("top" if distance < 0 else "bottom")
    text.xy = (ratio.index[0], ratio.iloc[0])
    right = axes.transData.inverted().transform((text.get_window_extent().x1, 0))[0]
    last = np.interp(math.log2(right), np.log2(ratio.index.to_numpy(dtype=float)), ratio)
    near = [*ratio[ratio.index <= right], float(last)]
    text.xy = (ratio.index[0], min(near) if distance < 0 else max(near))


def _covered(axes: Axes, text: Annotation, occupied: np.ndarray) -> float:
    """Return how many points (in pixels) a label covers; infinity if it leaves the axes."""
    box, outer = text.get_window_extent(), axes.get_window_extent()
    if box.x1 > outer.x1 or box.y0 < outer.y0 or box.y1 > outer.y1:
        return math.inf
    x, y = occupied.T
    return float(((x >= box.x0) & (x <= box.x1) & (y >= box.y0) & (y <= box.y1)).sum())


def _dense(line: Line2D) -> np.ndarray:
    """Return points of a line in pixels, too close for a word between two of them."""
    points = line.get_transform().transform(line.get_xydata())
    places = np.linspace(0, len(points) - 1, 40 * len(points))
    indices = np.arange(len(points))
    return np.stack([np.interp(places, indices, points[:, axis]) for axis in (0, 1)], axis=1)
