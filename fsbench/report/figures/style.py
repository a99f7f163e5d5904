"""Color and marker of each sampler, the same in every figure.

A sampler that ships with fsbench has a fixed color and marker (samplers.toml). Another sampler
takes a free slot in the palette of its family, chosen by a hash of its name.
"""

from __future__ import annotations

import tomllib
import zlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import pandas as pd
from matplotlib.typing import RcKeyType

from fsbench.provider import Kind

# Warm colors for fused samplers and those of fsbench, cool ones for the others, gray for bounds.
_FUSED = (
    *("#d55e00", "#c2187a", "#f28e2b", "#009e73", "#b35900", "#a50f15", "#d9a400"),
    *("#66c2a4", "#e7298a"),
)
_UNFUSED = (
    *("#0072b2", "#882255", "#cc6677", "#1f9ebf", "#8c564b", "#2ca02c", "#9467bd"),
    *("#14213d", "#a5a51f", "#7fd1ae", "#e7a6d0", "#5f7f8f"),
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
"""Line styles of a GPU's peaks: datasheet, measured."""


EMPHASIZED = ("fused", "screened")
"""Lines of the headline figure that are drawn thick."""


@cache
def samplers() -> dict[str, Any]:
    """Return samplers.toml: how figures draw the samplers of fsbench."""
    text = (resources.files(__package__) / "samplers.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


@dataclass(frozen=True)
class Style:
    """Style of a sampler's line. line: keyword arguments of Axes.plot."""

    kind: Kind
    line: dict[str, Any]


def styles(rows: pd.DataFrame) -> dict[str, Style]:
    """Return the style of each sampler measured in these rows of results."""
    families: dict[tuple[str, ...], list[str]] = {}
    kind_of: dict[str, Kind] = {}
    for row in rows[rows.status == "ok"].drop_duplicates("provider", keep="last").itertuples():
        kind_of[row.provider] = Kind(row.kind)
        is_emphasized = bool(row.fused) or row.provider.startswith(samplers()["ours"])
        families.setdefault(_palette(kind_of[row.provider], is_emphasized), []).append(row.provider)
    return {
        name: Style(kind_of[name], _line(kind_of[name], palette, slot))
        for palette, names in families.items()
        for name, slot in _slots(names, len(palette)).items()
    }


def headline_color(group: str) -> str:
    """Return the color of a group in the headline figure: its sampler's color in other figures."""
    slot = samplers()["slots"][samplers()["headline"][group]]
    return (_FUSED if group in EMPHASIZED else _UNFUSED)[slot]


def _palette(kind: Kind, is_emphasized: bool) -> tuple[str, ...]:
    if kind is Kind.LOWER_BOUND:
        return _BOUND
    if kind is Kind.GREEDY:
        return _NOT_EXACT
    return _FUSED if is_emphasized else _UNFUSED


def _slots(names: list[str], size: int) -> dict[str, int]:
    """Return a distinct slot for each name, below `size` while slots are free.

    Names in samplers.toml come first. On a collision, the later name in the alphabet moves on.
    """
    fixed: dict[str, int] = samplers()["slots"]
    slots: dict[str, int] = {}
    order = sorted(names, key=lambda name: (name not in fixed, name))
    for position, name in enumerate(order):
        lap = position // size * size  # slots below `lap` are all in use
        slot = fixed.get(name, zlib.crc32(name.encode())) % size
        while lap + slot in slots.values():
            slot = (slot + 1) % size
        slots[name] = lap + slot
    return slots


def _line(kind: Kind, palette: tuple[str, ...], slot: int) -> dict[str, Any]:
    lap, place = divmod(slot, len(palette))
    shade = palette[place]
    if kind is Kind.LOWER_BOUND:
        dashes = _DASHES[(place + lap) % len(_DASHES)]
        return {"color": shade, "linestyle": (0, dashes), "linewidth": 1.2, "zorder": 2.0}
    look = {"color": shade, "marker": _MARKERS[(place + 5 * lap) % len(_MARKERS)]}
    if palette is _NOT_EXACT:
        return {**look, "linestyle": ":", "linewidth": 1.2, "markerfacecolor": "white", "zorder": 3}
    fused = palette is _FUSED
    return {**look, "linewidth": 2.8 if fused else 1.3, "zorder": 5 if fused else 4}
