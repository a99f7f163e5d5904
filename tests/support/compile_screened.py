"""Compile the kernels of the screened sampler for sm_90; print JSON lines as compile_offline.py.

Run as a script, without TRITON_INTERPRET. `python tests/support/compile_screened.py`
"""

from __future__ import annotations

import json

import torch
from compile_offline import stack_bytes
from triton.experimental.gluon import language as gl

from fsbench.kernels.configs.screen import (
    HopperScreenConfig,
    ResolveConfig,
    ScreenConfig,
    default_configs,
    hopper_config,
    portable_config,
)
from fsbench.kernels.screened.hopper.kernel import CHUNK, hopper_screen_kernel
from fsbench.kernels.screened.portable import screen_kernel
from fsbench.kernels.screened.resolve import resolve_kernel

OPTIONS = {
    "soft_cap": "fp32",
    "bias_ptr": "*fp32",
    "row_bias_ptr": "*bf16",
    "mask_ptr": "*i32",
}
"""Arguments that may be None, and add work."""
POINTERS = {
    "fp32": ("scale_ptr", "residual_ptr", "norm_ptr", "numbers_ptr"),
    "i8": ("codes_ptr", "copy_ptr"),
    "i32": ("counters_ptr", "listed_ptr", "records_ptr", "list_ptr", "found_ptr"),
    "i64": ("seed_ptr", "offset_ptr", "lower_ptr", "keys_ptr", "tokens_ptr"),
    "bf16": ("hidden_ptr", "weight_ptr"),
    "i1": ("valid_ptr",),
}
NUMBERS = {
    "i32": ("B", "V", "D", "mask_words"),
    "fp32": ("gamma", "norm_inflation", "root"),
}


def compiled(fn, matrices: dict[str, str], constants: dict, everything: bool, config) -> int:
    """Stack bytes of a kernel, plain or with every option."""
    types = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names}
    types |= {name: kind for kind, names in NUMBERS.items() for name in names}
    types |= {"temperature": "*fp32" if everything else "fp32", **matrices}
    constants = {
        "NOISE": "token",
        "SEED_PER_ROW": everything,
        "OFFSET_PER_ROW": everything,
        "TEMPERATURE_PER_ROW": everything,
        "NVIDIA": True,
        "EARLY": True,
        "IN_BULK": True,
        **constants,
    }
    if everything:
        types |= OPTIONS
    else:
        constants |= dict.fromkeys(OPTIONS)
    constants = {name: value for name, value in constants.items() if name in fn.arg_names}
    signature = {name: types[name] for name in fn.arg_names if name in types}
    launch = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return stack_bytes(fn, signature, constants, 90, **launch)


def screen(config: ScreenConfig, everything: bool = False, use_tma: bool = True) -> int:
    codes, copy = "*i8", "*i8"
    if use_tma:
        codes = f"tensordesc<i8[{2 * config.block_b}, {config.block_d}]>"
        copy = f"tensordesc<i8[{config.block_v}, {config.block_d}]>"
    constants = {
        "ROOM": config.room,
        "DEPTH": config.depth,
        "LIST": config.row_room,
        "CHUNK": 2048,
        "AHEAD": config.ahead,
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "SLICE": config.slice,
        "V_ON_M": config.v_on_m,
        "USE_TMA": use_tma,
        "FLATTEN": config.flatten,
    }
    matrices = {"codes": codes, "copy": copy}
    return compiled(screen_kernel, matrices, constants, everything, config)


def hopper_screen(config: HopperScreenConfig, box: int, per_row: bool = False) -> int:
    fn = hopper_screen_kernel
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    types = {name: f"*{kind}" for kind, names in POINTERS.items() for name in names}
    types |= {name: kind for kind, names in NUMBERS.items() for name in names}
    types |= {
        "codes": f"tensordesc<i8[{box}, {CHUNK.value}],{layout!r}>",
        "copy": f"tensordesc<i8[128, {CHUNK.value}],{layout!r}>",
        "temperature": "*fp32" if per_row else "fp32",
    }
    constants = {
        "NOISE": "token",
        "SEED_PER_ROW": per_row,
        "OFFSET_PER_ROW": per_row,
        "TEMPERATURE_PER_ROW": per_row,
        "ROOM": config.room,
        "LIST": config.row_room,
        "CHUNK_OF_ROW": 2048,
        "AHEAD": config.ahead,
        "EARLY": True,
        "WARPGROUPS": config.warpgroups,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "STAGES": config.num_stages,
    }
    signature = {name: types[name] for name in fn.arg_names if name in types}
    return stack_bytes(fn, signature, constants, 90, num_warps=4)


def resolve(config: ResolveConfig, B: int, row_room: int, everything: bool = False) -> int:
    matrices = {
        "hidden": f"tensordesc<bf16[{config.block_b}, {config.block_d}]>",
        "weight": f"tensordesc<bf16[{config.block_v}, {config.block_d}]>",
    }
    constants = {
        "POWER_B": B,
        "LIST": row_room,
        "AT_ONCE": config.at_once,
        "BLOCKS": 16,
        "STEP": config.step,
        "EVEN": True,
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "USE_TMA": True,
        "SLICE": config.block_v,
    }
    return compiled(resolve_kernel, matrices, constants, everything, config)


def main() -> None:
    def report(kernel: str, variant: str, stack: int) -> None:
        print(json.dumps([kernel, variant, stack]), flush=True)

    for B in (1, 16, 32, 64):
        first = portable_config(B)
        _, second = default_configs(B, 4096, torch.device("cuda"))
        report("screen", f"{first}", screen(first))
        report("resolve", f"{second}", resolve(second, B, first.row_room))
    few = portable_config(1)
    report("screen", f"{few} everything", screen(few, everything=True))
    report("screen", f"{few} pointers", screen(few, use_tma=False))
    report("resolve", f"{second} everything", resolve(second, B, first.row_room, everything=True))
    for B in (16, 64):
        config = hopper_config(B)
        report("hopper_screen", f"{config}", hopper_screen(config, 2 * min(B, 32)))
    report("hopper_screen", f"{config} everything", hopper_screen(config, 64, per_row=True))


if __name__ == "__main__":
    main()
