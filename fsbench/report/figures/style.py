"""How each provider is drawn, derived from its name and kind, so that a new one needs no entry.

A provider's slot in the palette of its family comes from a hash of its name; names that collide
move on to the next free slot. So within one set of results no two lines look alike, every figure
of the set draws a provider in the same way, and a provider mostly keeps its look across sets.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.typing import RcKeyType

from fsbench.provider import Kind

# Warm colors for fused samplers, cool ones for the rest, grey for lower bounds.
_FUSED = ("#d7301f", "#f28e2b", "#c2187a", "#7f0000", "#d9a400", "#b35900")
_UNFUSED = (
    *("#1f77b4", "#2ca02c", "#9467bd", "#17becf", "#8c564b"),
    *("#a5a51f", "#14213d", "#7fd1ae", "#e7a6d0", "#5f7f8f"),
)
_NOT_EXACT = ("#b08d57", "#6c8ea4", "#a67aa0", "#7a9a6b")
_BOUND = ("#000000", "#6e6e6e", "#9a9a9a")
_MARKERS = "osD^vPX<>hp*"
_DASHES = ((6.0, 2.0), (2.5, 1.5), (8.0, 2.0, 1.5, 2.0))

SETTINGS: dict[RcKeyType, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 5.0,
    "savefig.dpi": 200,
    "svg.hashsalt": "fsbench",  # ids in an SVG are random otherwise
}
"""Matplotlib settings of every figure."""

ROOFS: tuple[dict[str, Any], ...] = (
    {"color": "#444444", "linewidth": 1.0, "linestyle": "-"},
    {"color": "#444444", "linewidth": 1.0, "linestyle": "-."},
)
"""Look of a GPU's roofs: datasheet, measured."""


@dataclass(frozen=True)
class Style:
    """Look of one provider's line: keyword arguments of Axes.plot, for one or several points."""

    kind: Kind
    line: dict[str, Any]


def styles(rows: pd.DataFrame) -> dict[str, Style]:
    """Style of every provider that was measured in these results rows."""
    families: dict[tuple[Kind, bool], list[str]] = {}
    for row in rows[rows.status == "ok"].drop_duplicates("provider", keep="last").itertuples():
        kind = Kind(row.kind)  # only exact samplers have other colors if they are fused
        families.setdefault((kind, kind is Kind.EXACT and bool(row.fused)), []).append(row.provider)
    return {
        name: Style(kind, _line(kind, fused, slot))
        for (kind, fused), names in families.items()
        for name, slot in _slots(names, len(_palette(kind, fused))).items()
    }


def _palette(kind: Kind, fused: bool) -> tuple[str, ...]:
    if kind is Kind.LOWER_BOUND:
        return _BOUND
    if kind is not Kind.EXACT:
        return _NOT_EXACT
    return _FUSED if fused else _UNFUSED


def _slots(names: list[str], size: int) -> dict[str, int]:
    """A number per name, all different; below `size` as long as there is room, then above."""
    taken: dict[str, int] = {}
    for position, name in enumerate(sorted(names)):
        lap = position // size * size  # slots below `lap` are all taken
        slot = zlib.crc32(name.encode()) % size
        while lap + slot in taken.values():
            slot = (slot + 1) % size
        taken[name] = lap + slot
    return taken


def _line(kind: Kind, fused: bool, slot: int) -> dict[str, Any]:
    palette = _palette(kind, fused)
    lap, place = divmod(slot, len(palette))
    color = palette[place]
    if kind is Kind.LOWER_BOUND:
        dashes = _DASHES[(place + lap) % len(_DASHES)]
        return {"color": color, "linestyle": (0, dashes), "linewidth": 1.2, "zorder": 2.0}
    look = {"color": color, "marker": _MARKERS[(place + 5 * lap) % len(_MARKERS)]}
    if kind is not Kind.EXACT:
        return {**look, "linestyle": ":", "linewidth": 1.2, "markerfacecolor": "white", "zorder": 3}
    return {**look, "linewidth": 2.4 if fused else 1.3, "zorder": 5 if fused else 4}
