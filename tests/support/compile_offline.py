"""Compile every shipped Triton kernel and config for GPUs that are not there; print JSON lines.

Run as a script, without TRITON_INTERPRET: `python tests/support/compile_offline.py 90`. A line has
the kernel, the config, and the stack bytes of the cubin (above 0: registers were spilled).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fsbench.baselines import weight_stream
from fsbench.kernels import (
    akunu_exact,
    akunu_faithful,
    flash_sampling_gather,
    flash_sampling_two_step,
    group_gumbel_parallel,
    gumbel_argmax,
    pivot_search,
)
from fsbench.kernels.call import pack_mask as _pack_mask
from fsbench.kernels.configs import hopper as hopper_tiles
from fsbench.kernels.configs import portable as portable_tiles
from fsbench.kernels.configs.hopper import CHUNK, HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.configs.tables import find
from fsbench.kernels.fused.hopper.kernel import hopper_kernel
from fsbench.kernels.fused.portable import flash_sampling_kernel
from fsbench.kernels.providing import akunu as _akunu_kernels
from fsbench.kernels.providing import matmul_form as _matmul_form
from fsbench.kernels.shard import merge_keys as _merge_keys
from fsbench.kernels.truncated import (
    api as _truncated_sample,
)
from fsbench.kernels.truncated import (
    look as _truncated_kernels,
)
from fsbench.kernels.truncated import (
    rows as _row_kernels,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Shared memory that one program may use, by compute capability.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def stack_bytes(fn, signature, constants, capability, **options) -> int:
    """Compile `fn`; pointers and divisible sizes are taken as multiples of 16."""
    names = fn.arg_names  # by which the attributes are numbered
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if signature[name].startswith("*")
        or (name in ("D", "V", "first_token", "stride") and name not in fn.do_not_specialize)
    }
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(
        fn, signature, constexprs=constants, attrs=attributes
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(compiled.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
    ).stdout
    os.unlink(file.name)
    return int(re.search(r"STACK:(\d+)", usage)[1])


def operands(config: TileConfig, dtype: str, use_tma: bool) -> dict[str, str]:
    shapes = {"hidden": config.block_b, "weight": config.block_v}
    return {
        name: f"tensordesc<{dtype}[{rows}, {config.block_d}]>" if use_tma else f"*{dtype}"
        for name, rows in shapes.items()
    }


def fitted(config: TileConfig, capability: int) -> TileConfig:
    return config.fitted(SHARED_LIMIT[capability] // config.ctas_per_sm - 1024, 2)


OPTIONS = {
    "soft_cap": "fp32",
    "bias_ptr": "*fp32",
    "row_bias_ptr": "*bf16",
    "mask_ptr": "*i32",
    "winners_ptr": "*fp32",
    "masses_ptr": "*fp32",
    "logprob_ptr": "*fp32",
    "logz_ptr": "*fp32",
}
"""Arguments of the fused kernels that may be None, and add work."""
STORED = {"logits_ptr": "*fp32", "largest_ptr": "*fp32"}
"""Where the logits are written, too."""
LINE = {"buffers_ptr": "*i64", "counts_ptr": "*i32"}
"""Those of several ranks."""


def fused(
    fn,
    matrices: dict[str, str],
    tiles: dict[str, int | bool],
    capability: int,
    noise: str = "group",
    samples: int = 1,
    everything: bool = False,
    ranks: int = 1,
    stores: bool = False,
    **launch: int,
) -> int:
    """A kernel of flash_sample, plain or with every option, on one GPU or several."""
    signature = {
        **matrices,
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "*fp32" if everything else "fp32",
        "keys_ptr": "*i64",
        "arrivals_ptr": "*i32",
        "tokens_ptr": "*i64",
        "valid_ptr": "*i1",
        **dict.fromkeys(("B", "V", "D", "mask_words", "samples", "first_sample"), "i32"),
        "stride": "i32",
        **dict.fromkeys(("first_token", "num_tokens", "rank", "area"), "i32"),
        **(OPTIONS if everything else {}),
        **(STORED if stores else {}),
        **(LINE if ranks > 1 else {}),
    }
    signature = {name: signature[name] for name in fn.arg_names if name in signature}
    constants = {
        "N": samples,
        "NOISE": noise,
        "SEED_PER_ROW": everything,
        "OFFSET_PER_ROW": everything,
        "TEMPERATURE_PER_ROW": everything,
        "RANKS": ranks,
        "WATCH": ranks > 1,
        **tiles,
        **({} if everything else dict.fromkeys(OPTIONS)),
        **({} if stores else dict.fromkeys(STORED)),
        **({} if ranks > 1 else dict.fromkeys(LINE)),
    }
    return stack_bytes(fn, signature, constants, capability, **launch)


def tile_constants(config: TileConfig, use_tma: bool) -> dict[str, int | bool]:
    return {
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "V_ON_M": config.v_on_m,
        "USE_TMA": use_tma,
        "FLATTEN": config.flatten,
    }


def portable(config: TileConfig, dtype: str, use_tma: bool, capability: int, **what) -> int:
    config = fitted(config, capability)
    tiles = {**tile_constants(config, use_tma), "SLICE": config.slice}
    stages = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    matrices = operands(config, dtype, use_tma)
    return fused(flash_sampling_kernel, matrices, tiles, capability, **what, **stages)


def hopper(config: HopperConfig, B: int, dtype: str, **what) -> int:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows = {"hidden": config.box_rows(B), "weight": 128}
    matrices = {name: f"tensordesc<{dtype}[{n}, {CHUNK}],{layout!r}>" for name, n in rows.items()}
    tiles = {
        "WARPGROUPS": config.warpgroups,
        "BLOCK_V": config.block_v,
        "CONTIGUOUS": config.contiguous,
        "BLOCK_D": config.block_d,
        "STAGES": config.num_stages,
    }
    return fused(hopper_kernel, matrices, tiles, 90, **what, num_warps=4)


def matmul_form(config: TileConfig, capability: int) -> int:
    config = fitted(config, capability)
    signature = {
        **operands(config, "bf16", True),
        "largest_ptr": "*fp32",
        **dict.fromkeys(("B", "V", "D"), "i32"),
    }
    stages = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    constants = tile_constants(config, True)
    return stack_bytes(_matmul_form._matmul_form_kernel, signature, constants, capability, **stages)


def sampling_look(V: int, top_k: int, capability: int, everything: bool = False) -> int:
    """The first look at stored logits, with one set of filters or with all options, of each row."""
    history = ("history_ptr", "counts_ptr", "lengths_ptr")
    numbers = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
    number = "*fp32" if everything else "fp32"
    plan = {} if _truncated_sample.is_small(top_k) else {"plan_ptr": "*i64", "numbers_ptr": "*fp32"}
    signature = {
        "logits_ptr": "*fp32",
        "largest_ptr": "*fp32",
        "found_ptr": "*i32",
        "keys_ptr": "*i64",
        **plan,
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": number,
        "top_k": "*i64" if everything else "i32",
        **dict.fromkeys(("top_p", "min_p"), number),
        **({} if not everything else dict.fromkeys(history, "*i32")),
        **dict.fromkeys(("repetition", "presence", "frequency"), number),
        "tokens_ptr": "*i64",
        "valid_ptr": "*i1",
        **({"kept_ptr": "*i32"} if everything else {}),
        **dict.fromkeys(("V", "stride", "capacity"), "i32"),
    }
    constants = {
        **({} if everything else dict.fromkeys((*history, "kept_ptr"))),
        **({} if plan else dict.fromkeys(("plan_ptr", "numbers_ptr"))),
        **{f"{name.upper()}_PER_ROW": everything for name in ("seed", "offset", "top_k", *numbers)},
        "GROUPS": 1 << (-(-V // 128) * 4 - 1).bit_length(),
        "CHUNK": _truncated_sample.chunk(top_k),
    }
    kernel = _truncated_kernels.sampling_look_kernel
    return stack_bytes(kernel, signature, constants, capability, **_truncated_sample.LOOK)


ROWS = {
    "logits_ptr": "*fp32",
    "largest_ptr": "*fp32",
    "plan_ptr": "*i64",
    "numbers_ptr": "*fp32",
    "sums_ptr": "*fp32",
    "before_ptr": "*fp32",
    "gathered_ptr": "*i64",
    "seed_ptr": "*i64",
    "offset_ptr": "*i64",
    "tokens_ptr": "*i64",
    "valid_ptr": "*i1",
    "kept_ptr": "*i32",
    **dict.fromkeys(("launch", "B", "stride", "blocks"), "i32"),
}
"""Arguments of the kernels with many programs per row."""


def row_kernels(capability: int, everything: bool = False) -> dict[str, int]:
    """Stack bytes by kernel; with what is absent unless kept tokens are counted, or without."""
    optional = ("kept_ptr", "before_ptr")
    options = {"sampling_cutoff_kernel": _truncated_sample.CUTOFF}
    found = {}
    for name in ("sampling_sections_kernel", "sampling_cutoff_kernel", "sampling_race_kernel"):
        kernel = getattr(_row_kernels, name)
        absent = [n for n in optional if n in kernel.arg_names and not everything]
        signature = {n: ROWS[n] for n in kernel.arg_names if n in ROWS and n not in absent}
        constants = {n: False for n in kernel.arg_names if n.endswith("_PER_ROW")}
        constants |= dict.fromkeys(absent)
        constants["ROWS"] = 256
        if "COUNT" in kernel.arg_names:
            constants["COUNT"] = everything
        found[name] = stack_bytes(
            kernel, signature, constants, capability,
            **options.get(name, {"num_warps": _truncated_sample.ROW_WARPS}),
        )  # fmt: skip
    return found


SCRATCH = {"keys_ptr": "*i64", "parts_ptr": "*i32"}


def akunu(mode: str, capability: int, per_row: bool = False) -> int:
    """The samplers over stored logits after akunu."""
    number = "*fp32" if per_row else "fp32"
    signature = {
        "logits_ptr": "*bf16",
        **({"scores_ptr": "*fp16"} if mode == "faithful" else SCRATCH),
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "fp32",
        "top_k": "*i32" if per_row else "i32",
        **dict.fromkeys(("top_p", "min_p"), number),
        **({"tokens_ptr": "*i64"} if mode == "exact" else {}),
        "V": "i32",
    }
    if mode == "faithful":
        kernel, constants = _akunu_kernels.akunu_faithful_kernel, {"BLOCK": akunu_faithful.BLOCK}
        return stack_bytes(
            kernel, signature, constants, capability, num_warps=akunu_faithful.NUM_WARPS
        )
    kernel = _akunu_kernels.akunu_exact_kernel
    constants = {"PER_ROW": per_row, "WIDE": 8, "TURNS": 8}
    return stack_bytes(kernel, signature, constants, capability, num_warps=akunu_exact.NUM_WARPS)


def pivoted(capability: int, per_row: bool = False) -> int:
    number = "*fp32" if per_row else "fp32"
    signature = {
        "logits_ptr": "*bf16",
        "keys_ptr": "*i64",
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "fp32",
        "top_k": "*i32" if per_row else "i32",
        **dict.fromkeys(("top_p", "min_p"), number),
        "tokens_ptr": "*i64",
        "V": "i32",
    }
    constants = {"PER_ROW": per_row, "BLOCK": pivot_search.BLOCK}
    kernel = pivot_search._pivot_search_kernel
    return stack_bytes(kernel, signature, constants, capability, num_warps=pivot_search.NUM_WARPS)


def local_samples(capability: int) -> int:
    signature = {
        "logits_ptr": "*bf16",
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "fp32",
        "scale": "fp32",
        "keys_ptr": "*i64",
        "masses_ptr": "*fp32",
        "V": "i32",
        "groups": "i32",
    }
    constants = {"GROUP": group_gumbel_parallel.GROUP}
    return stack_bytes(
        group_gumbel_parallel._local_sample_kernel, signature, constants, capability, num_warps=4
    )


def packing(capability: int) -> int:
    signature = {"mask_ptr": "*i1", "words_ptr": "*i32", "V": "i32"}
    constants = {"BLOCK": _pack_mask.BLOCK}
    return stack_bytes(_pack_mask._pack_mask_kernel, signature, constants, capability, num_warps=4)


def one_pass(dtype: str, capability: int) -> int:
    signature = {
        "logits_ptr": f"*{dtype}",
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "fp32",
        "keys_ptr": "*i64",
        "arrivals_ptr": "*i32",
        "tokens_ptr": "*i64",
        "first_token": "i32",
        "V": "i32",
        "splits": "i32",
    }
    constants = {"KEYS": True, "GREEDY": False, "BLOCK": gumbel_argmax.BLOCK}
    kernel = gumbel_argmax._gumbel_argmax_kernel
    return stack_bytes(kernel, signature, constants, capability, num_warps=gumbel_argmax.NUM_WARPS)


def exchanging(capability: int) -> int:
    signature = {
        "keys_ptr": "*i64",
        "tokens_ptr": "*i64",
        **LINE,
        **dict.fromkeys(("rank", "area", "B"), "i32"),
    }
    constants = {"RANKS": 4, "WATCH": True, "BLOCK": flash_sampling_two_step.BLOCK}
    kernel = flash_sampling_two_step._exchange_kernel
    return stack_bytes(kernel, signature, constants, capability, num_warps=4)


def merging(capability: int) -> int:
    """The kernels by which ranks merge what a collective has brought together; the most of them."""
    pointers = {"*i64": ("keys_ptr", "words_ptr", "seed_ptr", "offset_ptr", "tokens_ptr")}
    types = {name: kind for kind, names in pointers.items() for name in names}
    types |= {"logz_ptr": "*fp32", "K": "i32", "B": "i32"}
    kernels = (
        _merge_keys._merge_keys_kernel,
        flash_sampling_gather._pack_kernel,
        flash_sampling_gather._choose_rank_kernel,
    )
    return max(
        stack_bytes(
            kernel,
            {name: types[name] for name in kernel.arg_names if name in types},
            {"BLOCK": 128},
            capability,
            num_warps=4,
        )
        for kernel in kernels
    )


def stream(dtype: str, capability: int) -> int:
    signature = {"weight_ptr": f"*{dtype}", "partial_ptr": "*fp32", "num_elements": "i32"}
    constants = {
        "LOADS": weight_stream.LOADS,
        "BLOCK": weight_stream.NUM_WARPS * 32 * weight_stream.LOAD_BYTES // 2,
        "NUM_STAGES": weight_stream.NUM_STAGES,
    }
    kernel = weight_stream._weight_stream_kernel
    return stack_bytes(kernel, signature, constants, capability, num_warps=weight_stream.NUM_WARPS)


def main(capability: int) -> None:
    def report(kernel: str, variant: str, stack: int) -> None:
        print(json.dumps([kernel, variant, stack]), flush=True)

    tuned = capability == 90
    for B in portable_tiles.BUCKETS if tuned else (16, 64, 256):
        config = find("portable", B, 4096, "NVIDIA H200" if tuned else "untuned")
        report("flash_sampling", f"{config} bf16 tma", portable(config, "bf16", True, capability))
        # One bucket each shows what the other variants need.
        if B == 16:
            report("flash_sampling", f"{config} fp16", portable(config, "fp16", True, capability))
        if B == 64:
            stack = portable(config, "bf16", False, capability)
            report("flash_sampling", f"{config} pointers", stack)
            for noise in ("token", "none") if tuned else ():
                stack = portable(config, "bf16", True, capability, noise=noise)
                report("flash_sampling", f"{config} {noise}", stack)
            for samples in (1, 2):  # one is another path through the kernel than several
                what = {"samples": samples, "everything": True}
                stack = portable(config, "bf16", True, capability, **what)
                report("flash_sampling", f"{config} everything, n = {samples}", stack)
            report("matmul_form", str(config), matmul_form(config, capability))
        if tuned or B == 64:
            stack = portable(config, "bf16", True, capability, stores=True)
            report("flash_sampling", f"{config} stores", stack)
    for V, top_k in ((151936, 50), (151936, 1000), (151936, 0)) if tuned else ((128256, 50),):
        report("sampling_look", f"V={V} k={top_k}", sampling_look(V, top_k, capability))
    stack = sampling_look(151936, 0, capability, everything=True)
    report("sampling_look", "everything", stack)
    for everything in (False, True):
        for name, stack in row_kernels(capability, everything).items():
            report(name.removesuffix("_kernel"), "counting" if everything else "", stack)
    for B in hopper_tiles.BUCKETS if tuned else ():
        config = find("hopper", B, 4096, "NVIDIA H200")
        for dtype, noise in (("bf16", "group"), ("fp16", "none")):
            stack = hopper(config, B, dtype, noise=noise)
            report("flash_sampling_hopper", f"{config} {dtype} {noise}", stack)
        stack = hopper(config, B, "bf16", stores=True)
        report("flash_sampling_hopper", f"{config} stores", stack)
    if tuned:
        for samples in (1, 2):
            stack = hopper(config, B, "bf16", samples=samples, everything=True)
            report("flash_sampling_hopper", f"{config} everything, n = {samples}", stack)
        for ranks in (0, 2, 8):
            stack = hopper(config, B, "bf16", ranks=ranks)
            report("flash_sampling_hopper", f"{config} {ranks} ranks", stack)
    stack = portable(find("portable", 64, 4096, "untuned"), "bf16", True, capability, ranks=4)
    report("flash_sampling", "4 ranks", stack)
    report("akunu_faithful", "", akunu("faithful", capability))
    for per_row in (False, True):
        report("akunu_exact", "per row" if per_row else "", akunu("exact", capability, per_row))
    for per_row in (False, True):
        report("pivot_search", "per row" if per_row else "", pivoted(capability, per_row))
    report("gumbel_argmax", "bf16", one_pass("bf16", capability))
    report("group_gumbel_parallel", "bf16", local_samples(capability))
    report("flash_sampling_two_step", "exchange", exchanging(capability))
    report("flash_sampling_gather", "merging", merging(capability))
    report("pack_mask", "", packing(capability))
    report("weight_stream", "bf16", stream("bf16", capability))


if __name__ == "__main__":
    main(int(sys.argv[1]))
