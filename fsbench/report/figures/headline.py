"""Time over the matmul alone against B, four lines with their names at them: README's figure."""

from __future__ import annotations

import math

import pandas as pd
from matplotlib.figure import Figure

from fsbench.provider import Kind
from fsbench.report import logits_store
from fsbench.report.figures.parts import laid_out, log2_axis
from fsbench.report.tables import Configuration, stems

_SCREENED, _FLASHINFER = "screened", "flashinfer"  # in the names of samplers
_COLORS = {
    "fused": "#D55E00",
    "screened": "#009E73",
    "stored": "#0072B2",
    "flashinfer": "#882255",
}  # of Okabe and Ito, and of Tol; safe for color-blind readers
_WORDS = {
    "fused": "fused: {}",
    "screened": "fused: {}",
    "stored": "best that stores logits: {}",
    "flashinfer": "FlashInfer, the fastest at each B: {}",
}
_WIDE = ("fused", "screened")


def over_logits(found: list[Configuration]) -> dict[str, list[Configuration]]:
    """Unfiltered configurations that differ in the law of the logits alone, by a stem."""
    return stems([each for each in found if each.drawn is Kind.EXACT], {"logits"})


@laid_out
def draw(alike: list[Configuration]) -> Figure | None:
    """The figure; None unless a fused sampler and one that stores logits have a matmul beside."""
    lines = _lines(alike)
    if not {"fused", "stored"} <= set(lines):
        return None
    return _drawn(lines, alike[0].title)


def _lines(alike: list[Configuration]) -> dict[str, tuple[str, pd.Series]]:
    """Return of each group (names, smallest median over that of the matmul in the same run, by B).

    A line is the smallest of its group at each B; its name has every sampler that is the smallest
    at some B. Of several runs it is of the one with the most B, then the least geometric mean.
    """
    _, with_store = logits_store.pair()
    best: dict[str, tuple[tuple[int, float], str, pd.Series]] = {}
    for each in alike:
        ratios: dict[str, dict[str, pd.Series]] = {}
        for fused in (True, False):
            for name in each.providers(Kind.EXACT, fused=fused):
                ratio = _over_matmul(each, name)
                if name == with_store or ratio.empty:
                    continue
                group = "screened" if _SCREENED in name else "fused" if fused else "stored"
                group = "flashinfer" if name.startswith(_FLASHINFER) else group
                ratios.setdefault(group, {})[each.label(name)] = ratio
        for group, of in ratios.items():
            frame = pd.DataFrame(of)
            least = frame.min(axis=1)
            rank = (-len(least), math.exp(least.map(math.log).mean()))
            if group not in best or rank < best[group][0]:
                best[group] = (rank, " or ".join(frame.idxmin(axis=1).unique()), least)
    return {group: best[group][1:] for group in _COLORS if group in best}


def _over_matmul(each: Configuration, name: str) -> pd.Series:
    """Over the tightest bound, by B: to read the weight is less than to multiply by it."""
    ratios = [each.ratio(name, bound).value for bound in each.providers(Kind.LOWER_BOUND)]
    return min(ratios, key=lambda ratio: (-len(ratio), ratio.mean()), default=pd.Series())


def _drawn(lines: dict[str, tuple[str, pd.Series]], title: str) -> Figure:
    figure = Figure(figsize=(8.8, 4.2), layout="constrained")
    axes = figure.subplots()
    batches = sorted({B for _, ratio in lines.values() for B in ratio.index})
    for group, (_, ratio) in lines.items():
        width = 3.0 if group in _WIDE else 2.0
        axes.plot(ratio.index, ratio, "o-", color=_COLORS[group], linewidth=width, markersize=5)
    axes.axhline(1, color="#444444", linewidth=1.2, linestyle="--", zorder=1)
    log2_axis(axes, batches, "Batch size B (rows), log scale")
    axes.set_xlim(batches[0] * 0.85, batches[-1] * 1.12)
    low = min(ratio.min() for _, ratio in lines.values())
    axes.set_ylim(bottom=min(1.0, low) - 0.12)
    axes.set_ylabel("Time / time of the matmul alone", fontsize=10)
    axes.xaxis.label.set_fontsize(10)
    axes.tick_params(labelsize=10)
    axes.grid(False, axis="x")
    title = f"Time over that of the matmul alone: {title}"
    axes.set_title(title, fontsize=11, fontweight="bold")
    _name_lines(figure, lines)
    return figure


def _name_lines(figure: Figure, lines: dict[str, tuple[str, pd.Series]]) -> None:
    """Write the name of each line at its left: below a fused one, above another.

    A name is about as long as the first two thirds of a line, which it must not cross.
    """
    axes = figure.axes[0]
    for group, (label, ratio) in lines.items():
        below = group in _WIDE
        near = ratio.iloc[: max(1, 2 * len(ratio) // 3)]
        axes.annotate(
            _WORDS[group].format(label),
            xy=(ratio.index[0], near.min() if below else near.max()),
            xytext=(-3, -7 if below else 7),
            textcoords="offset points",
            va="top" if below else "bottom",
            fontsize=10,
            color=_COLORS[group],
            fontweight="bold" if below else "normal",
        )
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
