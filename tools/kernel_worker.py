"""The process in which kernel_compiler.py has a tree's variants compiled; no tool by itself.

As many processes as there are cores share the work. A result is kept under a key of the kernel's
source, of all that it is compiled with, and of Triton's version.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable
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
DIVISIBLE = ("D", "V", "first_token", "stride")
"""Numbers that are taken as multiples of 16, as pointers are."""

_variants: list[Any] = []
"""Those to compile: what the forked processes inherit, as kernels cannot be sent to them."""


def _compile(number: int) -> tuple[int, list[str]]:
    """(stack, instructions) of a variant, compiled unless that is kept from before."""
    variant = _variants[number]
    source = _source(variant)
    kept = _folder() / f"{_key(variant, source)}.json.gz"
    if kept.exists():
        stack, instructions = json.loads(gzip.decompress(kept.read_bytes()))
        return stack, instructions
    target = GPUTarget("cuda", variant.capability, 32)
    compiled = triton.compile(source, target=target, options=dict(variant.options))
    usage, code = _dump(compiled.asm["cubin"], "-res-usage", "-sass")
    resources = dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage))
    resources["dynamic SHARED"] = compiled.metadata.shared
    taken = ", ".join(f"{name} {amount}" for name, amount in resources.items())
    stack, instructions = int(resources["STACK"]), [taken, *instructions_of(code)]
    temporary = kept.with_suffix(f".{os.getpid()}")
    temporary.write_bytes(gzip.compress(json.dumps([stack, instructions]).encode(), 5))
    temporary.replace(kept)
    return stack, instructions


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


def _dump(cubin: bytes, *forms: str) -> Iterable[str]:
    """What cuobjdump prints of a cubin, in each form."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        for form in forms:
            yield subprocess.run(
                [CUOBJDUMP, form, file.name], capture_output=True, text=True, check=True
            ).stdout


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
    asked = parser.parse_args()
    _variants.extend(selected(asked.family, asked.capability, asked.quick))
    numbers = range(len(_variants))
    # Forked, so that nothing is imported again.
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(_compile, numbers, chunksize=1)
    with asked.out.open("w", encoding="utf-8") as file:
        for variant, (stack, instructions) in zip(_variants, results, strict=True):
            line = [variant.family, variant.name, variant.capability, stack, instructions]
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
