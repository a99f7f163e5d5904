"""The tool that compares two trees' kernels reports what is planted, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from compare_kernels import first_difference, report
from kernel_compiler import Compiled, compile_variants
from tree import ROOT

TOOL = ROOT / "tools" / "compare_kernels.py"


def compiled(name: str, *instructions: str) -> Compiled:
    return Compiled("add", name, 90, 0, ["REG 8", *instructions])


@pytest.mark.parametrize(
    "new, expected",
    [
        (["REG 8", "FADD R1, R2"], None),
        (["REG 9", "FADD R1, R2"], (0, "REG 8", "REG 9")),
        (["REG 8", "FADD R2, R1"], (1, "FADD R1, R2", "FADD R2, R1")),
        (["REG 8", "FADD R1, R2", "NOP"], (2, "the end", "NOP")),
        (["REG 8"], (1, "FADD R1, R2", "the end")),
    ],
)
def test_the_first_difference_is_found(new, expected):
    assert first_difference(["REG 8", "FADD R1, R2"], new) == expected


def test_a_report_of_equal_kernels_finds_nothing_wrong():
    lines = list(
        report([compiled("a", "NOP"), compiled("b")], [compiled("b"), compiled("a", "NOP")])
    )
    assert all(fine for fine, _ in lines)
    assert lines[-1][1].split() == ["total", "2", "2", "0", "0", "1"]


def test_a_report_names_what_differs_and_what_is_missing():
    old = [compiled("a", "NOP"), compiled("b"), compiled("c")]
    new = [compiled("a", "EXIT"), compiled("b"), compiled("d")]
    lines = [text for fine, text in report(old, new) if not fine]
    assert lines[0].split() == ["add", "4", "1", "1", "2", "1"]
    assert lines[1:] == [
        "add a sm_90: instruction 1\n    old  NOP\n    new  EXIT",
        "add c sm_90: only in the old tree",
        "add d sm_90: only in the new tree",
    ]


def test_a_tree_without_a_list_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="expected a tree with tools/kernel_variants"):
        compile_variants(tmp_path)


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def {name}(x_ptr, BLOCK: tl.constexpr):
    at = x_ptr + tl.arange(0, BLOCK)
    tl.store(at, {value})
"""
VARIANTS = """
from types import SimpleNamespace
from fsbench.kernels import tiny

def selected(families, capabilities, quick, brief):
    return [
        SimpleNamespace(
            family="tiny", name=f"block of {block}", kernel=tiny.NAME, options={"num_warps": 4},
            signature={"x_ptr": "*fp32"}, constants={"BLOCK": block}, capability=90,
        )
        for block in (128, 256)
    ]
"""


def plant(tree: Path, name: str, value: str) -> Path:
    """A tree of one kernel, with a list of two variants."""
    for path, text in {
        "fsbench/__init__.py": "",
        "kernels/__init__.py": "",
        "kernels/tiny.py": KERNEL.format(name=name, value=value),
        "tools/kernel_variants/__init__.py": VARIANTS.replace("NAME", name),
    }.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(text)
    return tree


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_difference_of_one_number_is_found_and_another_name_is_none(tmp_path):
    first = plant(tmp_path / "first", "tiny_kernel", "tl.load(at) + 1.0")
    renamed = plant(tmp_path / "renamed", "_tiny_kernel", "1.0 + tl.load(at)")
    other = plant(tmp_path / "other", "tiny_kernel", "tl.load(at) + 2.0")

    def compare(tree: Path) -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(TOOL), str(first), str(tree)],
            env={**os.environ, "FSBENCH_KERNEL_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
        assert not done.stderr
        return done.returncode, done.stdout.splitlines()

    code, lines = compare(renamed)
    assert (code, lines[-1].split()[:5]) == (0, ["total", "2", "2", "0", "0"])
    code, lines = compare(other)
    assert (code, lines[2].split()[:5]) == (1, ["total", "2", "0", "2", "0"])
    assert lines[3].startswith("tiny block of 128 sm_90: instruction ")
    assert lines[4].startswith("    old  FADD ") and lines[5].startswith("    new  FADD ")
