"""Variants of the screened sampler's kernels: the portable screen, that for Hopper, the second
launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig
from fsbench.kernels.configs.screen_choice import resolve_config
from fsbench.kernels.configs.tables import find
from fsbench.kernels.noise.group import group_size, tokens_of_block
from fsbench.kernels.screened.hopper.loading import COLUMNS
from kernel_variants.variant import CAPABILITIES, TUNED, Variant, kernel, variant

OPTIONS = {
    "soft_cap": "fp32",
    "bias_ptr": "*fp32",
    "row_bias_ptr": "*bf16",
    "mask_ptr": "*i32",
}
"""Arguments that may be None, and add work."""
SHARD = {
    **dict.fromkeys(("first_token", "num_tokens", "rank", "area"), "i32"),
    "buffers_ptr": "*i64",
    "counts_ptr": "*i32",
}
"""Arguments that are None without other ranks."""
POINTERS = {
    "fp32": ("scale_ptr", "residual_ptr", "norm_ptr", "numbers_ptr"),
    "i8": ("codes_ptr", "copy_ptr"),
    "i32": ("counters_ptr", "listed_ptr", "records_ptr", "list_ptr", "found_ptr"),
    "i64": ("seed_ptr", "offset_ptr", "lower_ptr", "keys_ptr", "tokens_ptr"),
    "i1": ("valid_ptr",),
}
NUMBERS = {
    "i32": ("B", "V", "D", "mask_words"),
    "fp32": ("gamma", "norm_inflation", "root"),
}
SCREEN = kernel("kernels.screened.portable", "screen_kernel")
HOPPER_SCREEN = kernel("kernels.screened.hopper.kernel", "hopper_screen_kernel")
RESOLVE = kernel("kernels.screened.resolve", "resolve_kernel")


def portable_config(B: int) -> ScreenConfig:
    """Of the portable screen, for B rows."""
    found: ScreenConfig = find("screened", B, 4096, "")
    return found


def hopper_config(B: int) -> HopperScreenConfig:
    """Of the screen for Hopper, for B rows."""
    found: HopperScreenConfig = find("screened", B, 4096, "", (9, 0))
    return found


class Asked(NamedTuple):
    """What a variant is compiled for. words: of its name, for what the rest does not say.

    everything: every option, and numbers of each row.
    ranks: that share the vocabulary.
    """

    words: str = ""
    dtype: str = "bf16"
    noise: str = "token"
    everything: bool = False
    use_tma: bool = True
    ranks: int = 1

    def name(self, config: ScreenConfig | HopperScreenConfig | ResolveConfig, of: str = "") -> str:
        """Of a variant; of: its problem."""
        tile = f"b{config.block_b}v{config.block_v}d{config.block_d}p{config.num_stages}"
        ranks = f"{self.ranks} ranks" if self.ranks > 1 else ""
        parts = (tile, self.dtype, self.noise, of, self.words, ranks)
        return " ".join(filter(None, parts))

    def launch(self, capability: int) -> tuple[dict[str, str], dict[str, Any]]:
        """(types, constants) of both launches."""
        types = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names}
        types |= {name: kind for kind, names in NUMBERS.items() for name in names}
        types |= {"hidden_ptr": f"*{self.dtype}", "weight_ptr": f"*{self.dtype}"}
        types |= {"temperature": "*fp32" if self.everything else "fp32"}
        per_row = ("SEED_PER_ROW", "OFFSET_PER_ROW", "TEMPERATURE_PER_ROW")
        constants: dict[str, Any] = {
            "NOISE": self.noise,
            **dict.fromkeys(per_row, self.everything),
            "NVIDIA": True,
            "FENCED": capability >= TUNED,
            "IN_BULK": capability >= 90,
            "RANKS": self.ranks,
            "WATCH": True,
        }
        types |= SHARD
        constants |= dict.fromkeys(SHARD) if self.ranks == 1 else {}
        if self.everything:
            return types | OPTIONS, constants
        return types, constants | dict.fromkeys(OPTIONS)


def _slots(config: ScreenConfig | HopperScreenConfig, noise: str) -> tuple[int, int, int]:
    """(slots, their room, tokens of a slice), as screened.launch has them."""
    size = group_size(noise)
    block = tokens_of_block(size)
    slots = min(config.slots, (128 if size > 1 else config.block_v) // block)
    return slots, config.room * config.slots // slots, slots * block


def _tiles(config: ScreenConfig | HopperScreenConfig | ResolveConfig) -> dict[str, int]:
    return {"BLOCK_B": config.block_b, "BLOCK_V": config.block_v, "BLOCK_D": config.block_d}


def _screen(
    config: ScreenConfig, capability: int = TUNED, columns: int = 0, **asked: Any
) -> Variant:
    """columns: of hidden that are rounded at a time, if these are fewer than usual."""
    what = Asked(**asked)
    types, constants = what.launch(capability)
    types |= {"codes": "*i8", "copy": "*i8"}
    if what.use_tma:
        types["codes"] = f"tensordesc<i8[{2 * config.block_b}, {config.block_d}]>"
        types["copy"] = f"tensordesc<i8[{config.block_v}, {config.block_d}]>"
    _, room, width = _slots(config, what.noise)
    constants |= _tiles(config) | {
        "ROOM": room,
        "DEPTH": config.depth,
        "LIST": config.row_room,
        "ROUNDED_AT_ONCE": columns or 512 * config.num_warps,
        "AHEAD": config.ahead,
        "SLICE": width,
        "V_ON_M": config.v_on_m,
        "USE_TMA": what.use_tma,
        "FLATTEN": config.flatten,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return variant("screen", what.name(config), SCREEN, types, constants, capability, **options)


def _hopper_screen(B: int, **asked: Any) -> Variant:
    config, what = hopper_config(B), Asked(**asked)
    if group_size(what.noise) > 1:
        config = replace(config, split=1)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    box = min(64, max(16, 2 << (B - 1).bit_length()))
    types, constants = what.launch(TUNED)
    types |= {
        "codes": f"tensordesc<i8[{box}, {COLUMNS.value}],{layout!r}>",
        "copy": f"tensordesc<i8[128, {COLUMNS.value}],{layout!r}>",
    }
    constants |= {
        "ROOM": _slots(config, what.noise)[1],
        "LIST": config.row_room,
        "ROUNDED_AT_ONCE": 512 * config.num_warps,
        "ROWS": config.block_b,
        "SPLIT": config.split,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "STAGES": config.num_stages,
    }
    name = what.name(config, f"box of {box}")
    return variant(
        "hopper_screen", name, HOPPER_SCREEN, types, constants, TUNED, num_warps=config.num_warps
    )


def _resolve(B: int, capability: int = TUNED, D: int = 4096, **asked: Any) -> Variant:
    """The second launch, for B rows of D columns."""
    config, what = resolve_config(B, D), Asked(**asked)
    types, constants = what.launch(capability)
    size = group_size(what.noise)
    by_warps = config.by_warps and capability == TUNED and what.use_tma and D % 256 == 0
    block_v = max(128, config.block_v) if size > 1 else config.block_v
    for name, rows in {"hidden": config.block_b, "weight": block_v}.items():
        box = f"tensordesc<{what.dtype}[{rows}, {config.block_d}]>"
        types[name] = box if what.use_tma else f"*{what.dtype}"
    constants |= _tiles(config) | {
        "POWER_B": 1 << (B - 1).bit_length(),
        "LIST": portable_config(B).row_room,
        "AT_ONCE": max(8 * config.num_warps if by_warps else config.at_once, size),
        "BLOCKS": max(8, 1 << (-(-D // 256) - 1).bit_length()),
        "STEP": config.step,
        "EVEN": D % 256 == 0,
        "USE_TMA": what.use_tma,
        "BLOCK_V": block_v,
        "SLICE": block_v,
        "IN_BULK": constants["IN_BULK"] and what.use_tma,
        "BY_WARPS": by_warps,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    name = what.name(config, f"B={B} D={D}")
    return variant("resolve", name, RESOLVE, types, constants, capability, **options)


def _tuned() -> Iterator[Variant]:
    """For Hopper: every config, and each option with one of them."""
    for B in (1, 16, 32, 64):  # a row for each config of the portable screen
        yield _screen(portable_config(B))
        yield _resolve(B)
    few, many = portable_config(1), portable_config(64)
    for config in (few, many):
        yield _screen(config, words="everything", everything=True)
    yield _screen(few, words="pointers", use_tma=False)
    yield _screen(few, dtype="fp16")
    yield _screen(few, noise="none")
    yield _screen(few, words="1024 columns", columns=1024)
    for D in (1000, 16_384, 32_768, 131_072):  # steps of 128 to 16; blocks that are not full
        yield _resolve(16, D=D)
    for B in (1, 64):
        yield _resolve(B, words="everything", everything=True)
    yield _resolve(64, dtype="fp16")
    yield _resolve(64, noise="none")
    yield _resolve(64, words="pointers", use_tma=False)
    for B in (16, 32, 64, 128):
        yield _hopper_screen(B)
    for noise in ("group4", "group8", "group16", "group"):
        for B in (1, 32, 64):
            yield _screen(portable_config(B), noise=noise)
        for B in (32, 64, 128):
            yield _hopper_screen(B, noise=noise)
        yield _resolve(64, noise=noise)
    yield _resolve(64, words="everything", everything=True, noise="group8")
    yield _screen(many, words="everything", everything=True, noise="group8")
    for noise in ("token", "group"):
        yield _screen(few, noise=noise, ranks=2)
        yield _hopper_screen(64, noise=noise, ranks=2)
        yield _resolve(64, noise=noise, ranks=2)
    yield _resolve(64, words="everything", everything=True, ranks=4)
    for B in (32, 64):
        yield _hopper_screen(B, words="everything", everything=True)
    yield _hopper_screen(64, dtype="fp16")
    yield _hopper_screen(64, noise="none")


def variants() -> Iterator[Variant]:
    """Of every config; on other GPUs than Hopper those for the fewest and for the most rows."""
    yield from _tuned()
    for capability in CAPABILITIES:
        if capability != TUNED:
            for B in (1, 64):
                yield _resolve(B, capability)
                yield _screen(portable_config(B), capability)
            yield _resolve(64, capability, words="everything", everything=True)
            yield _screen(portable_config(64), capability, words="everything", everything=True)
