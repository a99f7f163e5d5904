"""Variants of the kernels of filters from the screen: upper bounds, candidates, exact logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsbench.kernels.configs.screen import ResolveConfig, ScreenConfig
from fsbench.kernels.configs.screen_choice import FILTERED_ROWS, resolve_config
from fsbench.kernels.screened.filtered.launch import CANDIDATES, TILE, share_of_groups
from kernel_variants.screened import Asked, portable_config
from kernel_variants.variant import CAPABILITIES, TUNED, Variant, kernel, variant

ROOM = "kernels.screened.filtered"
PARTS = {
    "filter_screen": kernel(f"{ROOM}.upper", "filter_screen_kernel"),
    "filter_leaders": kernel(f"{ROOM}.candidates", "filter_leaders_kernel"),
    "filter_candidates": kernel(f"{ROOM}.candidates", "filter_candidates_kernel"),
    "filter_resolve": kernel(f"{ROOM}.resolve", "filter_resolve_kernel"),
}


def _parts(
    B: int, capability: int = TUNED, D: int = 4096, V: int = 151_936, **asked: Any
) -> Iterator[Variant]:
    """The four launches of B rows; with everything, top_k of each row."""
    screen, resolve, what = portable_config(B), resolve_config(B, D), Asked(**asked)
    types, constants = what.launch(capability)
    types |= {"logits_ptr": "*fp32", "largest_ptr": "*fp32", "stride": "i32"}
    types |= {"leaders_ptr": "*fp32", "leaders": "i32"}
    types |= {"top_k": "*i64" if what.everything else "i32", "codes": "*i8", "copy": "*i8"}
    types |= {"hidden": f"*{what.dtype}", "weight": f"*{what.dtype}"}
    if what.use_tma:
        types["codes"] = f"tensordesc<i8[{2 * screen.block_b}, {screen.block_d}]>"
        types["copy"] = f"tensordesc<i8[{screen.block_v}, {screen.block_d}]>"
        for name, rows in {"hidden": resolve.block_b, "weight": max(128, resolve.block_v)}.items():
            types[name] = f"tensordesc<{what.dtype}[{rows}, {resolve.block_d}]>"
    constants |= {
        "TOP_K_PER_ROW": what.everything,
        "ROUNDED_AT_ONCE": 512 * screen.num_warps,
        "AHEAD": screen.ahead,
        "V_ON_M": screen.v_on_m,
        "FLATTEN": screen.flatten,
        "SHARE": share_of_groups(-(-V // 128) * 128),
        "TILE": TILE,
        "POWER_B": 1 << (B - 1).bit_length(),
        "LIST": screen.row_room,
        "AT_ONCE": resolve.at_once,
        "BLOCKS": max(16, 1 << (-(-D // 256) - 1).bit_length()),
        "STEP": resolve.step,
        "EVEN": D % 256 == 0,
        "USE_TMA": what.use_tma,
        "IN_BULK": constants["IN_BULK"] and what.use_tma,
    }
    for family, part in PARTS.items():
        config: ScreenConfig | ResolveConfig = screen if family == "filter_screen" else resolve
        least = 128 if family == "filter_resolve" else 0
        tiles = {"BLOCK_B": config.block_b, "BLOCK_V": max(least, config.block_v)}
        tiles["BLOCK_D"] = config.block_d
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        options = CANDIDATES if family == "filter_candidates" else options
        title = what.name(config, f"B={B} D={D}").replace(" token", "")
        every = {**constants, **tiles}
        yield variant(family, title, part, types, every, capability, **options)


def variants() -> Iterator[Variant]:
    """Both configs of the screen, both heads, and every option."""
    for B in (8, FILTERED_ROWS):
        yield from _parts(B)
        yield from _parts(B, words="everything", everything=True)
    yield from _parts(8, D=8192, V=128_256)
    yield from _parts(8, words="pointers", use_tma=False)
    yield from _parts(8, dtype="fp16")
    yield from _parts(8, D=1000, V=32_000)
    for capability in CAPABILITIES:
        if capability != TUNED:
            yield from _parts(FILTERED_ROWS, capability, words="everything", everything=True)
