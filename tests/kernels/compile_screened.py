"""Compile the kernels of the screened sampler for sm_90; print JSON lines as compile_offline.py.

Run as a script, without TRITON_INTERPRET. `python tests/kernels/compile_screened.py`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from compile_offline import fitted, operands, stack_bytes

from fsbench.kernels import _screened_kernel as kernels
from fsbench.kernels._screened_sample import ScreenConfig, default_config
from fsbench.kernels._tile_tables import find

OPTIONS = {
    "soft_cap": "fp32",
    "bias_ptr": "*fp32",
    "row_bias_ptr": "*bf16",
    "mask_ptr": "*i32",
}
"""Arguments that may be None, and add work."""


def hidden(block_b: int) -> int:
    signature = {
        "hidden_ptr": "*bf16",
        "codes_ptr": "*i8",
        "numbers_ptr": "*fp32",
        "lower_ptr": "*i32",
        "overflow_ptr": "*i32",
        "keys_ptr": "*i64",
        "listed_ptr": "*i32",
        "found_ptr": "*i32",
        "arrivals_ptr": "*i32",
        **dict.fromkeys(("B", "D"), "i32"),
        **dict.fromkeys(("gamma", "norm_inflation", "root"), "fp32"),
    }
    constants = {"BLOCK_B": block_b, "BLOCK_D": 2048}
    return stack_bytes(kernels.screen_hidden_kernel, signature, constants, 90)


def request(everything: bool) -> tuple[dict[str, str], dict[str, object]]:
    signature = {
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "*fp32" if everything else "fp32",
        **(OPTIONS if everything else {}),
        "lower_ptr": "*i32",
        "overflow_ptr": "*i32",
        "records_ptr": "*i32",
        "listed_ptr": "*i32",
        "list_ptr": "*i32",
        **dict.fromkeys(("B", "V", "D", "mask_words", "sample"), "i32"),
    }
    constants = {
        "NOISE": "token",
        "SEED_PER_ROW": everything,
        "OFFSET_PER_ROW": everything,
        "TEMPERATURE_PER_ROW": everything,
        **({} if everything else dict.fromkeys(OPTIONS)),
    }
    return signature, constants


def in_order(fn, signature: dict[str, str]) -> dict[str, str]:
    return {name: signature[name] for name in fn.arg_names if name in signature}


def screen(config: ScreenConfig, everything: bool = False, use_tma: bool = True) -> int:
    signature, constants = request(everything)
    copy = f"tensordesc<i8[{config.block_v}, {config.block_d}]>" if use_tma else "*i8"
    signature = {
        **signature,
        "codes": f"tensordesc<i8[{config.block_b}, {config.block_d}]>" if use_tma else "*i8",
        "copy": copy,
        **dict.fromkeys(("scale_ptr", "residual_ptr", "norm_ptr", "numbers_ptr"), "*fp32"),
    }
    constants = {
        **constants,
        "ROOM": config.room,
        "LIST": config.row_room,
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "SLICE": config.slice,
        "V_ON_M": config.v_on_m,
        "USE_TMA": use_tma,
        "FLATTEN": config.flatten,
    }
    fn = kernels.screen_kernel
    return stack_bytes(
        fn,
        in_order(fn, signature),
        constants,
        90,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


def resolve(config: ScreenConfig, B: int, everything: bool = False) -> int:
    whole = fitted(find("portable-token", B, 4096, "NVIDIA H200"), 90)
    signature, constants = request(everything)
    del signature["records_ptr"]
    signature = {
        **signature,
        **operands(whole, "bf16", True),
        **dict.fromkeys(("hidden_ptr", "weight_ptr"), "*bf16"),
        "keys_ptr": "*i64",
        "found_ptr": "*i32",
        "arrivals_ptr": "*i32",
        "tokens_ptr": "*i64",
        "valid_ptr": "*i1",
        "per_row": "i32",
    }
    constants = {
        **constants,
        "LIST": config.row_room,
        "AT_ONCE": config.at_once,
        "ROWS": config.rows,
        "STEP": config.step,
        "BLOCK_B": whole.block_b,
        "BLOCK_V": whole.block_v,
        "BLOCK_D": whole.block_d,
        "V_ON_M": whole.v_on_m,
        "USE_TMA": True,
        "SLICE": whole.slice,
    }
    fn = kernels.resolve_kernel
    return stack_bytes(
        fn,
        in_order(fn, signature),
        constants,
        90,
        num_warps=whole.num_warps,
        num_stages=whole.num_stages,
    )


def main() -> None:
    def report(kernel: str, variant: str, stack: int) -> None:
        print(json.dumps([kernel, variant, stack]), flush=True)

    report("screen_hidden", "", hidden(64))
    for B in (1, 32, 64):
        config = default_config(B, torch.device("cuda"))
        report("screen", f"{config}", screen(config))
        report("resolve", f"{config}", resolve(config, B))
    report("screen", f"{config} everything", screen(config, everything=True))
    report("screen", f"{config} pointers", screen(config, use_tma=False))
    report("resolve", f"{config} everything", resolve(config, B, everything=True))


if __name__ == "__main__":
    main()
