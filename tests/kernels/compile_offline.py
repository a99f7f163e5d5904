"""Compile every shipped Triton kernel and config for GPUs that are not there; print JSON lines.

Run as a script, without TRITON_INTERPRET: `python tests/kernels/compile_offline.py 90`. A line has
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

from fsbench.baselines import weight_stream
from fsbench.kernels import _flash_sampling_config as tiles
from fsbench.kernels import gumbel_argmax
from fsbench.kernels._flash_sampling_kernel import flash_sampling_kernel

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# Shared memory that one program may use, by compute capability.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


def stack_bytes(fn, signature, constants, capability, **options) -> int:
    """Compile `fn`; pointers and divisible sizes are taken as multiples of 16."""
    names = list(signature)
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in names
        if signature[name].startswith("*") or name in ("V", "D")
    }
    source = ASTSource(fn, signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(compiled.asm["cubin"])
    usage = subprocess.run(
        [CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
    ).stdout
    os.unlink(file.name)
    return int(re.search(r"STACK:(\d+)", usage)[1])


def fused(config: tiles.TileConfig, dtype: str, use_tma: bool, capability: int) -> int:
    config = config.fitted(SHARED_LIMIT[capability] // config.ctas_per_sm - 1024, 2)
    shapes = {"hidden": config.block_b, "weight": config.block_v}
    matrices = {
        name: f"tensordesc<{dtype}[{rows}, {config.block_d}]>" if use_tma else f"*{dtype}"
        for name, rows in shapes.items()
    }
    signature = {
        **matrices,
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "fp32",
        "keys_ptr": "*i64",
        "arrivals_ptr": "*i32",
        "tokens_ptr": "*i64",
        "valid_ptr": "*i1",
        "B": "i32",
        "V": "i32",
        "D": "i32",
    }
    constants = {
        "BLOCK_B": config.block_b,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
        "SLICE": config.slice,
        "V_ON_M": config.v_on_m,
        "USE_TMA": use_tma,
        "FLATTEN": config.flatten,
        "ROTATE": config.rotate,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return stack_bytes(flash_sampling_kernel, signature, constants, capability, **options)


def one_pass(dtype: str, capability: int) -> int:
    signature = {
        "logits_ptr": f"*{dtype}",
        "seed_ptr": "*i64",
        "offset_ptr": "*i64",
        "temperature": "fp32",
        "keys_ptr": "*i64",
        "arrivals_ptr": "*i32",
        "tokens_ptr": "*i64",
        "V": "i32",
        "splits": "i32",
    }
    constants = {"BLOCK": gumbel_argmax.BLOCK}
    kernel = gumbel_argmax._gumbel_argmax_kernel
    return stack_bytes(kernel, signature, constants, capability, num_warps=gumbel_argmax.NUM_WARPS)


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
    tuned = capability == 90
    for B in tiles.BUCKETS if tuned else (16, 64, 256):
        config = tiles.config_for(B, 4096, "NVIDIA H200" if tuned else "untuned")
        variants = [("bf16", True)]
        # One config each shows what the other dtype and the pointer path need.
        if tuned and B == 16:
            variants.append(("fp16", True))
        if B == 64:
            variants.append(("bf16", False))
        for dtype, use_tma in variants:
            name = f"{config} {dtype} {'tma' if use_tma else 'pointers'}"
            stack = fused(config, dtype, use_tma, capability)
            print(json.dumps(["flash_sampling", name, stack]), flush=True)
    print(json.dumps(["gumbel_argmax", "bf16", one_pass("bf16", capability)]))
    print(json.dumps(["weight_stream", "bf16", stream("bf16", capability)]))


if __name__ == "__main__":
    main(int(sys.argv[1]))
