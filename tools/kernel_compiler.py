"""Compiles the kernel variants of a tree for GPUs that are not there: stack and instructions.

A tree's list is its tools/kernel_variants. It is compiled in a process of its own
(kernel_worker.py), which has that tree's fsbench, and no interpreter, whatever the caller has.
Results are kept from run to run, in $FSBENCH_KERNEL_CACHE, else in ~/.cache/fsbench/kernels.

    python tools/kernel_compiler.py [--quick]

prints the variants of this tree with their stack, in bytes (above 0: registers were spilled).

    python tools/kernel_compiler.py --elsewhere

writes what the plain portable kernel takes on GPUs that nobody has timed it on, for `make docs`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

TOOLS = Path(__file__).resolve().parent
COMPILED = TOOLS / "pages" / "compiled.csv"
ELSEWHERE = {"sm_80": 80, "sm_89": 89, "sm_100": 100, "sm_120": 120, "gfx942": 942}
"""GPUs that the portable kernel is compiled for and has not been timed on."""


class Compiled(NamedTuple):
    """What a variant was compiled to.

    stack: bytes of a thread.
    instructions: the registers and the memory that it takes, then its instructions in order, each
        an opcode with its operands; empty if they were not asked for.
    """

    family: str
    name: str
    capability: int
    stack: int
    instructions: list[str]

    @property
    def title(self) -> str:
        return " ".join(filter(None, [self.family, self.name, f"sm_{self.capability}"]))


def compile_variants(
    tree: Path = TOOLS.parent,
    families: Sequence[str] = (),
    capability: int | None = None,
    quick: bool = False,
    brief: bool = False,
    instructions: bool = False,
    named: str = "",
    ptx: bool = False,
) -> list[Compiled]:
    """The variants of a tree, compiled: all, or those of some families or of one capability.

    quick: one of each family. brief: every config, and every option once.
    instructions: these, too, and not the stack alone. named: a regular expression of names.
    ptx: lines of PTX in place of the instructions, and 0 for the stack.

    Raises:
        RuntimeError: the tree has no list, or it does not compile; with what the process printed.
    """
    tree = tree.resolve()
    if not (tree / "tools" / "kernel_variants").is_dir():
        raise RuntimeError(f"{tree}: expected a tree with tools/kernel_variants")
    asked = ["--family", *families, *(["--quick"] if quick else [])]
    asked += ["--brief"] if brief else []
    asked += ["--instructions"] if instructions else []
    asked += [f"--named={named}", *(["--ptx"] if ptx else [])]
    asked += [] if capability is None else ["--capability", str(capability)]
    with _site(tree) as site, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compiled.jsonl"
        worker = str(TOOLS / "kernel_worker.py")
        done = subprocess.run(
            # -P: the modules beside the worker are not the tree's.
            [sys.executable, "-P", worker, str(out), *asked],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(site), str(tree / "tools")]),
                "TRITON_INTERPRET": "0",
                # With line numbers, ptxas names registers by where a function stands in its file.
                **({"TRITON_DISABLE_LINE_INFO": "1"} if instructions else {}),
                "TRITON_CACHE_DIR": str(Path(folder) / "triton"),  # too large to be kept
            },
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{tree}: its kernel variants do not compile\n{done.stderr}")
        return [Compiled(*json.loads(line)) for line in out.read_text("utf-8").splitlines()]


@contextmanager
def _site(tree: Path) -> Iterator[Path]:
    """A folder of links to import a tree's fsbench from, its kernels and baselines included."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "fsbench"
        package.mkdir()
        entries = [tree / "kernels", tree / "baselines", *(tree / "fsbench").iterdir()]
        for entry in entries:
            link = package / entry.name
            if entry.exists() and not link.is_symlink():
                link.symlink_to(entry.resolve())
        yield Path(folder)


def elsewhere() -> list[dict[str, str]]:
    """Registers of a thread, bytes of stack and of shared memory on each of ELSEWHERE."""
    columns = {"registers": "REG", "stack": "STACK", "shared": "dynamic SHARED"}
    rows = []
    for gpu, capability in ELSEWHERE.items():
        for compiled in compile_variants(
            families=["flash_sampling"],
            capability=capability,
            instructions=True,
            named="bf16 group$",
        ):
            said = dict(part.rsplit(" ", 1) for part in compiled.instructions[0].split(", "))
            taken = {name: said[theirs] for name, theirs in columns.items()}
            rows.append({"gpu": gpu, "config": compiled.name.split()[0], **taken})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the kernel variants of this tree.")
    parser.add_argument("--quick", action="store_true", help="one variant of each kernel")
    parser.add_argument("--elsewhere", action="store_true", help=f"write {COMPILED.name}")
    asked = parser.parse_args()
    if asked.elsewhere:
        rows = elsewhere()
        with COMPILED.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["triton", *rows[0]], lineterminator="\n")
            writer.writeheader()
            writer.writerows({"triton": version("triton"), **row} for row in rows)
        return
    for compiled in compile_variants(quick=asked.quick):
        print(f"{compiled.stack:5} {compiled.title}")


if __name__ == "__main__":
    main()
