"""Compile the launches of public calls without a GPU: registers, stack, instructions.

    python tools/compile_kernels.py

writes tools/kernels.csv, which tests compare: for each launch on compute capability 9.0 the
registers of a thread, bytes of stack, and instructions that access a spilled register or an array,
by the installed Triton and by the oldest supported one (`make oldest-triton`).

    python tools/compile_kernels.py --compare OLD_TREE [--kernels REGEX] [--architecture sm_80]

compares the machine code of another checkout with that of this one, launch by launch: registers,
memory, and every opcode with its operands. The exit code is 1 if one differs. Use it for changes
that should leave the kernels identical (git worktree add /tmp/before HEAD~1).

    python tools/compile_kernels.py --elsewhere

writes the resources of the plain portable kernel on GPUs that it has not been timed on, for
`make docs`.

The calls are those of kernel_calls.py, on tensors without memory, in a process that imports the
tree's fsbench. Results are cached in $FSBENCH_KERNEL_CACHE, by default ~/.cache/fsbench.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import gzip
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

TOOLS = Path(__file__).resolve().parent
TABLE = TOOLS / "kernels.csv"
COMPILED = TOOLS / "pages" / "compiled.csv"
ELSEWHERE = ("sm_80", "sm_89", "sm_100", "sm_120", "gfx942")
"""GPUs that the portable kernel is compiled for but has not been timed on."""
TABLED = (
    r"^(portable B=\d+ plain|(portable|hopper) B=64 (everything|top 20)"
    r"|hopper B=(256 logprob|160 D=4096|192 D=8192( token noise)?|320 D=4096|64 fp8)"
    r"|portable B=16 int8|score B=64 everything"
    r"|truncated B=(64 (k = 50|k = 1000|p|min-p, p|kept)|256 .*)"
    r"|screened B=(16( D=1000)?|64)"
    r"|filters from the screen B=(4|16) D=4096|draft B=4|verify|pack a mask|noise map"
    r"|(akunu_\w+|pivot_search|gumbel_argmax|group_gumbel_parallel|weight_stream"
    r"|flash_sampling_(hopper|store|all_reduce)) B=16|flash_sampling_token B=64 matmul form"
    r"|flash_sampling_hopper B=256|flash_sampling_(gather|two_step|screened) B=64 2 ranks)$"
)
"""Calls in kernels.csv: every kernel, and the tuned launches."""
OLDEST = "3.6.0"
"""The oldest supported Triton; kernels.csv has its rows next to those of the installed one."""
TUNED = (
    r"^(portable B=\d+ plain|(portable|hopper) B=64 top 20|hopper B=(256 logprob|64 fp8)"
    r"|truncated B=(64 k = 1000|256 .*)|screened B=64|flash_sampling_(hopper .*|store B=16))$"
)
"""Calls of TABLED that OLDEST leaves out: it compiles their kernels for other calls."""
FORMAT = 3
"""Version of the cached results."""


class Compiled(NamedTuple):
    """A compiled kernel, with the launches that use it.

    launches: names of calls, with # and a number for the second launch of the kernel in a call.
    registers: of a thread. stack: bytes of a thread. shared: bytes of a program.
    spills: instructions that load from the stack or store to it.
    instructions: in order, each an opcode with its operands.
    constants: compile-time constants and options.
    ptx: the PTX code; "" for AMD's GPUs.
    """

    kernel: str
    launches: list[str]
    registers: int
    stack: int
    shared: int
    spills: int
    instructions: list[str]
    constants: dict[str, Any]
    ptx: str = ""


def compile_calls(
    tree: Path = TOOLS.parent,
    architecture: str = "sm_90",
    kernels: str = "",
    named: str = "",
    triton: Path | None = None,
) -> list[Compiled]:
    """Compile the launches of a tree, equal ones once.

    Args:
        architecture: one of kernel_calls.CHIPS_OF.
        kernels, named: regular expressions that names of kernels and of calls must match.
        triton: a folder with another Triton than the installed one (see `tritons`).

    Raises:
        RuntimeError: a call fails or a kernel does not compile, with the output of the process; or
            the folder has no Triton.
    """
    if triton and not (triton / "triton").is_dir():
        install = f"pip install --no-deps --target {triton} triton=={OLDEST}"
        raise RuntimeError(f"{triton}: expected a Triton; `make oldest-triton` or `{install}`")
    with _site(tree.resolve()) as site, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "compiled.jsonl"
        worker = ["--worker", str(out), "--architecture", architecture]
        done = subprocess.run(
            # -P: modules next to this file are not the tree's.
            [sys.executable, "-P", __file__, *worker, f"--kernels={kernels}", f"--named={named}"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, filter(None, (triton, site, TOOLS)))),
                "TRITON_INTERPRET": "0",
                # With line numbers, the registers that ptxas chooses depend on the lines of code.
                "TRITON_DISABLE_LINE_INFO": "1",
                # Triton 3.10's default, for launches that do not name enable_fp_fusion.
                "TRITON_DEFAULT_FP_FUSION": "0",
                "TRITON_CACHE_DIR": str(Path(folder) / "triton"),  # too large to keep
            },
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{tree}: its kernels do not compile\n{done.stderr[-4000:]}")
        return [Compiled(*json.loads(line)) for line in out.read_text("utf-8").splitlines()]


def tritons() -> dict[str, Path | None]:
    """Return the folder of each Triton of kernels.csv by version; None: the installed one."""
    return {OLDEST: Path(sys.prefix) / f"triton-{OLDEST}", version("triton"): None}


def tabled(triton: str) -> str:
    """Return a regular expression of the calls in kernels.csv for a version of Triton."""
    return f"(?!{TUNED}){TABLED}" if triton == OLDEST else TABLED


@contextmanager
def _site(tree: Path) -> Iterator[Path]:
    """Yield a folder of links from which a tree's fsbench is imported."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "fsbench"
        package.mkdir()
        for entry in (tree / "kernels", tree / "baselines", *(tree / "fsbench").iterdir()):
            link = package / entry.name
            if entry.exists() and not link.is_symlink():
                link.symlink_to(entry.resolve())
        yield Path(folder)


def first_difference(old: Sequence[str], new: Sequence[str]) -> tuple[int, str, str] | None:
    """Return (index, old, new) of the first difference of two lists of instructions, or None."""
    for place, (one, other) in enumerate(zip_longest(old, new, fillvalue="the end")):
        if one != other:
            return place, one, other
    return None


def differences(old: list[Compiled], new: list[Compiled]) -> list[str]:
    """Return a text for each launch that differs or is in one tree only."""
    before, after = (
        {(each.kernel, launch): each for each in kernels for launch in each.launches}
        for kernels in (old, new)
    )
    notes = []
    for kernel, launch in before | after:
        one, other = before.get((kernel, launch)), after.get((kernel, launch))
        if one is None or other is None:
            notes.append(f"{kernel}, {launch}: only in the {'new' if one is None else 'old'} tree")
        elif difference := first_difference(_lines(one), _lines(other)):
            place, was, now = difference
            notes.append(f"{kernel}, {launch}: line {place}\n    old  {was}\n    new  {now}")
    return notes


def _lines(compiled: Compiled) -> list[str]:
    """Return the resources of a kernel, then its instructions."""
    taken = f"{compiled.registers} registers, {compiled.stack} B stack, {compiled.shared} B shared"
    return [taken, *compiled.instructions]


def table(compiled: list[Compiled]) -> list[dict[str, str]]:
    """Return the rows of kernels.csv: one for each launch, sorted by kernel and call."""
    columns = ("registers", "stack", "spills", "shared")
    rows = [
        {"kernel": each.kernel, "launch": launch}
        | {name: str(getattr(each, name)) for name in columns}
        for each in compiled
        for launch in each.launches
    ]
    return sorted(rows, key=lambda row: (row["kernel"], row["launch"]))


def elsewhere(named: str = r"^portable B=\d+ plain$") -> list[dict[str, str]]:
    """Return registers of a thread, bytes of stack and shared memory, for each of ELSEWHERE."""
    rows = []
    for gpu in ELSEWHERE:
        for each in compile_calls(architecture=gpu, named=named):
            taken = {name: str(getattr(each, name)) for name in ("registers", "stack", "shared")}
            rows.append({"gpu": gpu, "config": _config(each.constants), **taken})
    return rows


def _config(constants: dict[str, Any]) -> str:
    """Return the tile shape of a launch of the portable kernel."""
    sizes = zip("bvds", ("BLOCK_B", "BLOCK_V", "BLOCK_D", "SLICE"), strict=True)
    tiles = "".join(f"{letter}{constants[name]}" for letter, name in sizes)
    turned = "M" if constants["V_ON_M"] else "N"
    return f"{tiles}{turned}w{constants['num_warps']}p{constants['num_stages']}"


def write(path: Path, rows_of: dict[str, list[dict[str, str]]]) -> None:
    """Write a table from the rows of each version of Triton."""
    rows = [{"triton": triton, **row} for triton, rows in rows_of.items() for row in rows]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the rows of a table, by the version of Triton."""
    rows_of = defaultdict(list)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows_of[row.pop("triton")].append(row)
    return dict(rows_of)


_work: list[tuple[Any, Any, Any]] = []
"""(source, target, options) of each launch; forked processes inherit it."""
_NOT_IN_KEY = ("TRITON_CACHE_DIR", "TRITON_DEFAULT_FP_FUSION")
"""Variables that change no result; the options have the second."""


def _compile(number: int) -> list[Any]:
    """Return [registers, stack, shared, spills, instructions, PTX] of a launch, cached."""
    import triton

    source, target, options = _work[number]
    environment = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith("TRITON_") and name not in _NOT_IN_KEY
    )
    key = f"{FORMAT} {triton.__version__} {target} {options} {environment} {source.hash()}"
    default = Path.home() / ".cache" / "fsbench" / "kernels"
    folder = Path(os.environ.get("FSBENCH_KERNEL_CACHE", default))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{hashlib.sha256(key.encode()).hexdigest()}.json.gz"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may compile the same kernel
        if kept.exists():
            result: list[Any] = json.loads(gzip.decompress(kept.read_bytes()))
            return result
        compiled = triton.compile(source, target=target, options=options.__dict__)
        result = _of_amd(compiled) if target.backend == "hip" else _of_nvidia(compiled)
        temporary = kept.with_suffix(".partial")
        temporary.write_bytes(gzip.compress(json.dumps(result).encode(), 5))
        temporary.replace(kept)
    return result


def _of_nvidia(compiled: Any) -> list[Any]:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([program, form, file.name], capture_output=True, text=True, check=True)
            for form in ("-res-usage", "-sass")
        )
    taken = dict(re.findall(r"(REG|STACK):(\d+)", usage.stdout))
    lines = instructions_of(code.stdout)
    spills = sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines)
    numbers = [int(taken["REG"]), int(taken["STACK"]), compiled.metadata.shared, spills]
    return [*numbers, lines, compiled.asm["ptx"]]


def _of_amd(compiled: Any) -> list[Any]:
    """Return the same without instructions, which cuobjdump cannot read."""
    usage = dict(re.findall(r"^ +\.(\w+): +(\d+)$", compiled.asm["amdgcn"], re.MULTILINE))
    stack = int(usage["private_segment_fixed_size"])
    return [int(usage["vgpr_count"]), stack, compiled.metadata.shared, 0, [], ""]


def instructions_of(code: str) -> list[str]:
    """Return the instructions in the output of `cuobjdump -sass`, without addresses."""
    lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", code, re.MULTILINE)
    return [re.sub(r"\s+", " ", instruction) for instruction in lines]


def work(out: Path, architecture: str, kernels: str, named: str) -> None:
    """Collect the launches of the imported fsbench, then compile them in parallel."""
    import kernel_calls
    import triton

    from fsbench.errors import InvalidArgument
    from fsbench.kernels.warming.offline import use_cpu_guard, without_gpu

    use_cpu_guard()
    launches_of: dict[tuple[Any, str], list[str]] = {}
    jobs = []
    with without_gpu(kernel_calls.CHIPS_OF[architecture]) as launches:
        for call in kernel_calls.calls(architecture):
            if not re.search(named, call.name):
                continue
            launches.clear()
            try:
                call.run()
            except Exception as error:
                if architecture != "sm_90" and isinstance(error, InvalidArgument):
                    continue  # a kernel for Hopper, or a dtype that this GPU lacks
                raise RuntimeError(f"{architecture}, {call.name}: {error}") from error
            numbers: dict[str, int] = defaultdict(int)
            for launch in launches:
                name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
                numbers[name] += 1
                if not re.search(kernels, name):
                    continue
                where = call.name + (f" #{numbers[name]}" if numbers[name] > 1 else "")
                if (launch.kernel, launch.key) not in launches_of:
                    launches_of[launch.kernel, launch.key] = []
                    jobs.append((name, launch))
                launches_of[launch.kernel, launch.key].append(where)
        target = triton.runtime.driver.active.get_current_target()
    constants = []
    for _, launch in jobs:
        kernel, _, signature, _, constexprs, options, attributes, *_ = launch.compile.args
        _work.append((kernel.ASTSource(kernel, signature, constexprs, attributes), target, options))
        named_constants = {kernel.arg_names[path[0]]: value for path, value in constexprs.items()}
        names = ("num_warps", "num_stages", "enable_fp_fusion")
        numbers_ = {name: getattr(options, name, None) for name in names}
        constants.append(
            {n: v for n, v in (named_constants | numbers_).items() if isinstance(v, int | str)}
        )
    # Forked, so that nothing is imported again.
    with multiprocessing.get_context("fork").Pool(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(_compile, range(len(_work)), chunksize=1)
    with out.open("w", encoding="utf-8") as file:
        for (name, launch), result, values in zip(jobs, results, constants, strict=True):
            *result, ptx = result
            line = [name, launches_of[launch.kernel, launch.key], *result, values, ptx]
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Parse the options; write a table or print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--compare", type=Path, metavar="TREE", help="with this checkout")
    parser.add_argument("--architecture", default="sm_90", help="sm_80, sm_90, sm_100")
    parser.add_argument("--kernels", default="", help="a regular expression of names")
    parser.add_argument("--elsewhere", action="store_true", help=f"write {COMPILED.name}")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--named", default="", help="a regular expression of names of calls")
    args = parser.parse_args()
    which = (args.architecture, args.kernels, args.named)
    if args.worker:
        work(args.worker, *which)
        return
    if args.elsewhere:
        write(COMPILED, {version("triton"): elsewhere()})
        return
    try:
        if not args.compare:
            rows = {}
            for name, site in tritons().items():
                rows[name] = table(compile_calls(named=tabled(name), triton=site))
            write(TABLE, rows)
            return
        new = compile_calls(TOOLS.parent, *which)
        old = compile_calls(args.compare, *which)
    except RuntimeError as error:
        sys.exit(f"{error}")
    if not old or not new:
        sys.exit("no launches: is --kernels the name of a kernel?")
    notes = differences(old, new)
    launches = sum(len(each.launches) for each in new)
    print("\n".join([*notes, f"{len(notes)} differences, {launches} launches in this tree"]))
    sys.exit(1 if notes else 0)


if __name__ == "__main__":
    main()
