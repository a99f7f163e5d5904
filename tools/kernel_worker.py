"""The process in which kernel_compiler.py has a tree's variants compiled; no tool by itself.

As many processes as there are cores share the work. A result is kept under a key of the kernel's
source, of all that it is compiled with, and of Triton's version.
"""

from __future__ import annotations

import argparse
import base64
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import triton
from kernel_variants import selected
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

FORMAT = 1
"""Raised when what is kept of a kernel changes."""
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
AMD = 942
"""What variants for gfx942 have in place of a compute capability."""
DIVISIBLE = ("D", "V", "first_token", "stride")
"""Numbers that are taken as multiples of 16, as pointers are."""

_variants: list[Any] = []
"""Those to compile: what the forked processes inherit, as kernels cannot be sent to them."""


def _compile(number: int, disassemble: bool) -> tuple[int, list[str]]:
    """(stack, instructions if they are asked for) of a variant; see kernel_compiler.Compiled."""
    variant = _variants[number]
    source = _source(variant)
    kept = _folder() / f"{_key(variant, source)}.json.gz"
    if kept.exists():
        stack, instructions = _read(kept)
        return stack, instructions
    # Disassembling takes longer than compiling a small kernel, and the stack is known without.
    cubin = kept.with_suffix(".cubin")
    if cubin.exists():
        taken, code = _read(cubin)
    else:
        try:
            compiled = triton.compile(
                source, target=_target(variant.capability), options=_options(variant)
            )
        except Exception as error:
            title = f"{variant.family} {variant.name} sm_{variant.capability}"
            raise RuntimeError(f"{title}: it does not compile\n{error}") from None
        if variant.capability == AMD:
            return _of_amd(compiled)
        usage = _dump(compiled.asm["cubin"], "-res-usage")
        taken = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
        taken["dynamic SHARED"] = compiled.metadata.shared
        code = base64.b64encode(compiled.asm["cubin"]).decode()
    stack = int(taken["STACK"])
    if not disassemble:
        _write(cubin, [taken, code])
        return stack, []
    resources = ", ".join(f"{name} {amount}" for name, amount in taken.items())
    instructions = [resources, *instructions_of(_dump(base64.b64decode(code), "-sass"))]
    _write(kept, [stack, instructions])
    cubin.unlink(missing_ok=True)
    return stack, instructions


def _target(capability: int) -> GPUTarget:
    return (
        GPUTarget("hip", "gfx942", 64) if capability == AMD else GPUTarget("cuda", capability, 32)
    )


def _of_amd(compiled: Any) -> tuple[int, list[str]]:
    """As _compile, without the instructions: cuobjdump knows none of these."""
    said = dict(re.findall(r"^ +\.(\w+): +(\d+)$", compiled.asm["amdgcn"], re.MULTILINE))
    stack = said["private_segment_fixed_size"]
    shared = compiled.metadata.shared
    return int(stack), [f"REG {said['vgpr_count']}, STACK {stack}, dynamic SHARED {shared}"]


def _options(variant: Any) -> dict[str, Any]:
    """What a kernel is compiled with: as configs.gpu.bind_and_launch passes it."""
    return {**variant.options, "enable_fp_fusion": True}


def _translate(number: int) -> tuple[int, list[str]]:
    """(0, lines of PTX) of a variant, which are not kept."""
    variant = _variants[number]
    target = _target(variant.capability)
    compiled = triton.compile(_source(variant), target=target, options=_options(variant))
    return 0, compiled.asm["ptx"].splitlines()


def _read(path: Path) -> Any:
    return json.loads(gzip.decompress(path.read_bytes()))


def _write(path: Path, what: Any) -> None:
    """Whole or not at all: others may read and write the same."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(gzip.compress(json.dumps(what).encode(), 5))
    temporary.replace(path)


def _source(variant: Any) -> ASTSource:
    kernel = variant.kernel
    names = kernel.arg_names  # by which the attributes are numbered
    divisible = set(DIVISIBLE) - set(kernel.do_not_specialize)
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in variant.signature.items()
        if kind.startswith("*") or name in divisible
    }
    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    form = GluonASTSource if kernel.is_gluon() else ASTSource
    return form(kernel, signature, constexprs=dict(variant.constants), attrs=attributes)


def _key(variant: Any, source: ASTSource) -> str:
    environment = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith("TRITON_") and name != "TRITON_CACHE_DIR"
    )
    compiler = (FORMAT, triton.__version__, variant.capability, sorted(variant.options.items()))
    text = f"{compiler} {environment} {source.hash()}"
    return hashlib.sha256(text.encode()).hexdigest()


def _folder() -> Path:
    default = Path.home() / ".cache" / "fsbench" / "kernels"
    folder = Path(os.environ.get("FSBENCH_KERNEL_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _dump(cubin: bytes, form: str) -> str:
    """What cuobjdump prints of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), form, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def instructions_of(code: str) -> list[str]:
    """The instructions of what `cuobjdump -sass` prints, without their addresses and encodings."""
    found = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", code, re.MULTILINE)
    return [re.sub(r"\s+", " ", instruction) for instruction in found]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", nargs="*", default=[])
    parser.add_argument("--capability", type=int, nargs="*", default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--named", default="")
    parser.add_argument("--ptx", action="store_true")
    asked = parser.parse_args()
    chosen = selected(asked.family, asked.capability, asked.quick, asked.brief)
    _variants.extend(variant for variant in chosen if re.search(asked.named, variant.name))
    numbers = range(len(_variants))
    work = _translate if asked.ptx else partial(_compile, disassemble=asked.instructions)
    # Forked, so that nothing is imported again.
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(work, numbers, chunksize=1)
    with asked.out.open("w", encoding="utf-8") as file:
        for variant, (stack, instructions) in zip(_variants, results, strict=True):
            line = [variant.family, variant.name, variant.capability, stack, instructions]
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
