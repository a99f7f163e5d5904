"""The fastest exact sampler at each B and LM head, as one figure of colored cells."""

from __future__ import annotations

from collections import Counter

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fsbench.provider import Kind
from fsbench.report.figures.parts import laid_out
from fsbench.report.figures.style import Style
from fsbench.report.recommend import Advice, recommend
from fsbench.report.tables import Configuration, conditions_in_words


@laid_out
def draw(alike: list[Configuration], styles: dict[str, Style]) -> Figure | None:
    """One row per LM head, one column per B, in the color of the fastest exact sampler.

    The number in a cell is the share of time that it saves over the fastest sampler of the other
    way: over stored logits if it is fused, and the reverse. Which that is depends on what was
    measured: it is named below, by a mark. A cell in which one way alone was measured stays empty:
    nothing is the fastest of one. None for fewer than two LM heads.

    Args:
        alike: configurations that differ in nothing but the LM head (tables.families).
    """
    rows = [
        (each, [one for one in recommend(each, each.providers(Kind.EXACT)) if one.instead_of])
        for each in alike
    ]
    rows = sorted((row for row in rows if row[1]), key=lambda row: _size(row[0]))
    if len(rows) < 2:
        return None
    batches = sorted({advice.b for _, found in rows for advice in found})
    width = max(8.8, 3.6 + 0.62 * len(batches))  # the title needs 8.5
    figure = Figure(figsize=(width, 1.5 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    marks = _marks(rows)
    for y, (_, found) in enumerate(rows):
        for advice in found:
            x = batches.index(advice.b)
            color = styles[advice.best].line["color"]
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white"))
            text = _saving(advice) + marks.get(advice.instead_of or "", "")
            axes.text(x, y, text, ha="center", va="center", color="white", fontsize=8)
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(batches)), [str(B) for B in batches])
    axes.set_yticks(range(len(rows)), [each.head for each, _ in rows])
    axes.tick_params(length=0)
    axes.grid(False)
    axes.set_xlabel("Batch size B (rows)")
    first = rows[0][0].rows.iloc[0]
    axes.set_title(
        "Fastest exact sampler of each LM head, D × V, and the time it saves\n"
        "over the fastest of the other way: fused, or over stored logits\n"
        f"{first.gpu_name or 'CPU'}; {conditions_in_words(first)}"
    )
    labels = {advice.best: each.label(advice.best) for each, found in rows for advice in found}
    handles = [Rectangle((0, 0), 1, 1, facecolor=styles[name].line["color"]) for name in labels]
    rivals = {name: each.label(name) for each, _ in rows for name in marks if _has(each, name)}
    notes = [f"{marks[name] or 'no mark'}: over {rivals[name]}" for name in marks]
    handles += [Rectangle((0, 0), 1, 1, alpha=0) for _ in notes]
    figure.legend(handles, [*labels.values(), *notes], loc="outside lower left", ncols=2)
    return figure


def _marks(rows: list[tuple[Configuration, list[Advice]]]) -> dict[str, str]:
    """A mark for every sampler that a winner is compared with; none for the most frequent one."""
    rivals = Counter(
        advice.instead_of for _, found in rows for advice in found if advice.instead_of
    )
    return {name: number * "*" for number, (name, _) in enumerate(rivals.most_common())}


def _has(configuration: Configuration, provider: str) -> bool:
    return provider in set(configuration.rows.provider)


def _size(configuration: Configuration) -> tuple[int, int]:
    first = configuration.rows.iloc[0]
    return int(first.d), int(first.v)


def _saving(advice: Advice) -> str:
    return "" if advice.saves is None else f"{advice.saves:.0%}"
