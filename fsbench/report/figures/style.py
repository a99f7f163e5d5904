"""The look of each sampler, the same in every figure.

A sampler that ships with fsbench has a fixed color and marker (`_SLOTS`), so all figures draw it
alike. Another one takes a free slot in the palette of its family, found by a hash of its name, so
no two lines of one figure look alike.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
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
_SLOTS = {
    # in _FUSED
    "flash_sampling_auto": 0,
    "flash_sample": 0,  # as `fsbench e2e` names it
    "flash_sampling_hopper": 1,
    "flash_sampling": 2,
    "flash_sampling_screened": 3,
    "screened": 3,
    "flash_sampling_token": 4,
    "flash_sampling_topk_topp": 5,
    "flash_sampling_store": 6,
    "flash_sampling_topk_topp_screened": 7,
    "flash_score": 8,
    # in _UNFUSED
    "gumbel_argmax": 0,
    "flashinfer_gumbel_lean": 1,
    "flashinfer_top_k_top_p_lean": 2,
    "flashinfer_gumbel": 3,
    "exponential_race": 4,
    "flashinfer_top_k_top_p": 5,
    "multinomial_compiled": 6,
    "vllm_gumbel": 7,
    "vllm": 7,
    "flashinfer_joint": 8,
    "flashinfer_cake": 9,
    "vllm_flashinfer": 10,
    "hf_generate": 11,
    # in _NOT_EXACT and _BOUND
    "greedy": 0,
    "flash_sampling_greedy": 1,
    "weight_stream": 0,
    "matmul_only": 1,
}
"""Place of a sampler in the palette of its family."""

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
"""Lines of a GPU's peaks: datasheet, measured."""


@dataclass(frozen=True)
class Style:
    """Look of a sampler's line. line: keyword arguments of Axes.plot."""

    kind: Kind
    line: dict[str, Any]


def styles(rows: pd.DataFrame) -> dict[str, Style]:
    """Return the style of every sampler that was measured in these rows of results."""
    families: dict[tuple[str, ...], list[str]] = {}
    kinds: dict[str, Kind] = {}
    for row in rows[rows.status == "ok"].drop_duplicates("provider", keep="last").itertuples():
        kinds[row.provider] = Kind(row.kind)
        ours = bool(row.fused) or row.provider.startswith("flash_sampling")
        families.setdefault(_palette(kinds[row.provider], ours), []).append(row.provider)
    return {
        name: Style(kinds[name], _line(kinds[name], palette, slot))
        for palette, names in families.items()
        for name, slot in _slots(names, len(palette)).items()
    }


def color(provider: str, fused: bool) -> str:
    """Return the color of a sampler of fsbench in all figures."""
    return (_FUSED if fused else _UNFUSED)[_SLOTS[provider]]


def _palette(kind: Kind, ours: bool) -> tuple[str, ...]:
    if kind is Kind.LOWER_BOUND:
        return _BOUND
    if kind is Kind.GREEDY:
        return _NOT_EXACT
    return _FUSED if ours else _UNFUSED


def _slots(names: list[str], size: int) -> dict[str, int]:
    """Return a number for each name, all different; below `size` while there is room.

    Names in `_SLOTS` come first. Of two with one number, the later in the alphabet moves on.
    """
    slots: dict[str, int] = {}
    order = sorted(names, key=lambda name: (name not in _SLOTS, name))
    for position, name in enumerate(order):
        lap = position // size * size  # slots below `lap` are all in use
        slot = _SLOTS.get(name, zlib.crc32(name.encode())) % size
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
