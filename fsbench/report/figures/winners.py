"""Map of the faster approach, fused or stored logits, by B and LM head."""

from __future__ import annotations

from collections import Counter

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from fsbench.provider import Kind
from fsbench.report.compare import WITHIN
from fsbench.report.figures.parts import laid_out
from fsbench.report.figures.style import Style, headline_color, samplers
from fsbench.report.recommend import Advice, recommend
from fsbench.report.tables import Configuration, conditions_in_words

FUSED, STORED, NOISE = headline_color("fused"), headline_color("stored"), "#8a8a8a"
"""Colors of cells: fused is faster, storing logits is faster, difference within noise."""

FORCED = dict.fromkeys(samplers()["forced"], samplers()["public_call"])
"""Sampler that forces one kernel of flash_sample -> sampler that makes the public call."""

COLUMNS = 12
"""Most columns; with more batch sizes, only powers of two are shown."""

Row = tuple[Configuration, list[Advice]]


@laid_out
def draw(group: list[Configuration], styles: dict[str, Style]) -> Figure | None:
    """Draw a row per LM head and a column per B, in the color of the faster approach.

    The number in a cell is the share of time that the fastest exact sampler saves over the fastest
    sampler of the other approach (fused or stored logits). Differences of at most WITHIN, the
    difference between two runs of one program, are gray. An asterisk marks another baseline than
    the usual one. A cell stays empty if only one approach was measured.

    Args:
        group: configurations that differ only in the LM head (tables.families).

    Returns:
        The figure, or None for fewer than two LM heads.
    """
    rows = [(each, _advice(each)) for each in group]
    rows = sorted((row for row in rows if row[1]), key=lambda row: _size(row[0]))
    if len(rows) < 2:
        return None
    batches = sorted({one.b for _, advice in rows for one in advice})
    note = ""
    if len(batches) > COLUMNS:
        note = "; of the batch sizes only powers of two are counted and shown"
        batches = [b for b in batches if b & (b - 1) == 0]
        rows = [(each, [one for one in advice if one.b in batches]) for each, advice in rows]
    figure = Figure(figsize=(8.8, 1.9 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    marks = _marks(rows)
    for y, (each, advice) in enumerate(rows):
        for one in advice:
            x = batches.index(one.b)
            cell = Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=_color(each, one))
            cell.set_edgecolor("white")
            axes.add_patch(cell)
            text = f"{one.saves:.0%}" + marks[one.instead_of or ""]
            axes.text(x, y, text, ha="center", va="center", color="white", fontsize=9)
    axes.set_xlim(-0.5, len(batches) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xticks(range(len(batches)), [str(B) for B in batches])
    axes.set_yticks(range(len(rows)), [each.head for each, _ in rows], fontsize=8)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.set_xlabel("Batch size B (rows)")
    first = rows[0][0].rows.iloc[0]
    figure.suptitle(
        f"{finding(rows)}\nNumbers: time saved over the fastest of the other way{note}\n"
        f"{first.gpu_name or 'CPU'}; {conditions_in_words(first)}",
        x=0.01,
        ha="left",
        fontsize=9.5,
    )
    _legend(figure, rows, marks)
    return figure


def finding(rows: list[Row]) -> str:
    """Return the title: at how many points fused sampling is faster by more than noise."""
    points = [_color(each, one) for each, advice in rows for one in advice]
    counts = Counter(points)
    return (
        f"Fused sampling is faster at {counts[FUSED]} of {len(points)} points, "
        f"slower at {counts[STORED]}, within {WITHIN:.0%} at {counts[NOISE]}"
    )


def _advice(each: Configuration) -> list[Advice]:
    advice = recommend(each, each.providers(Kind.EXACT), forced=FORCED)
    fused = each.providers(Kind.EXACT, fused=True)
    ways = [{one.best in fused, one.instead_of in fused} for one in advice]
    return [one for one, way in zip(advice, ways, strict=True) if one.instead_of and len(way) == 2]


def _color(each: Configuration, one: Advice) -> str:
    if one.saves is None or one.saves <= WITHIN:
        return NOISE
    return FUSED if one.best in each.providers(Kind.EXACT, fused=True) else STORED


def _legend(figure: Figure, rows: list[Row], marks: dict[str, str]) -> None:
    """Add a legend with the fastest samplers of each color, and the baselines of the numbers."""
    winners: dict[str, dict[str, None]] = {}
    rivals: dict[str, str] = {}
    for each, advice in rows:
        for one in advice:
            winners.setdefault(_color(each, one), {})[each.label(one.best)] = None
            rivals[one.instead_of or ""] = each.label(one.instead_of or "")
    names = {
        FUSED: "fused: ",
        STORED: "over stored logits: ",
        NOISE: f"no difference above {WITHIN:.0%}",
    }
    entries = {}
    for shade, text in names.items():
        if shade in winners:
            text += "" if shade == NOISE else " or ".join(winners[shade])
            entries[text] = Rectangle((0, 0), 1, 1, facecolor=shade)
    for name, mark in marks.items():
        entries[f"{mark or 'no mark'}: over {rivals[name]}"] = Rectangle((0, 0), 1, 1, alpha=0)
    figure.legend(list(entries.values()), list(entries), loc="outside lower left", ncols=1)


def _marks(rows: list[Row]) -> dict[str, str]:
    """Return the mark of each baseline, '' for the most frequent one."""
    rivals = Counter(one.instead_of for _, advice in rows for one in advice if one.instead_of)
    return {name: number * "*" for number, (name, _) in enumerate(rivals.most_common())}


def _size(configuration: Configuration) -> tuple[int, int]:
    first = configuration.rows.iloc[0]
    return int(first.d), int(first.v)
