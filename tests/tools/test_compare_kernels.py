"""The tool that compares two trees' kernels reports what is planted, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from compile_kernels import (
    Compiled,
    differences,
    first_difference,
    instructions_of,
    read,
    table,
    write,
)
from tree import ROOT

TOOL = ROOT / "tools" / "compile_kernels.py"


def compiled(name: str, *instructions: str, registers: int = 8) -> Compiled:
    return Compiled("add", [name], registers, 0, 0, 0, list(instructions), {})


@pytest.mark.parametrize(
    "new, expected",
    [
        (["FADD R1, R2"], None),
        (["FADD R2, R1"], (0, "FADD R1, R2", "FADD R2, R1")),
        (["FADD R1, R2", "NOP"], (1, "the end", "NOP")),
        ([], (0, "FADD R1, R2", "the end")),
    ],
)
def test_the_first_difference_is_found(new, expected):
    assert first_difference(["FADD R1, R2"], new) == expected


def test_a_difference_is_named_and_nothing_else():
    old = [compiled("a", "NOP"), compiled("b"), compiled("c"), compiled("e")]
    new = [compiled("a", "EXIT"), compiled("b"), compiled("d"), compiled("e", registers=9)]
    assert differences(old, new) == [
        "add, a: line 1\n    old  NOP\n    new  EXIT",
        "add, c: only in the old tree",
        "add, e: line 0\n    old  8 registers, 0 B stack, 0 B shared\n"
        "    new  9 registers, 0 B stack, 0 B shared",
        "add, d: only in the new tree",
    ]


def test_a_table_is_read_as_it_was_written(tmp_path):
    kernels = [Compiled("b", ["z", "y"], 9, 8, 7, 6, [], {}), compiled("x")]
    written = {"3.6.0": table(kernels), "3.9.0": table(kernels[:1])}
    write(tmp_path / "a.csv", written)
    assert read(tmp_path / "a.csv") == written
    rows = written["3.6.0"]
    assert [(row["kernel"], row["launch"]) for row in rows] == [
        ("add", "x"),
        ("b", "y"),
        ("b", "z"),
    ]
    assert rows[1]["spills"] == "6" and rows[1]["registers"] == "9"


def test_instructions_have_neither_address_nor_encoding():
    code = "  /*0010*/   FADD R1,  R2 ;   /* 0x000 */\n /* 0x0fe */\n  /*0020*/ EXIT ; /* 0x1 */"
    assert instructions_of(code) == ["FADD R1, R2", "EXIT"]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_tree_is_compared_with_one_that_rounds_otherwise(tmp_path):
    """Of the noise map: an addition of one in a copy of the tree."""
    for name in ("kernels", "baselines", "fsbench"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(tmp_path)], check=True)
    path = tmp_path / "kernels" / "noise" / "map.py"

    def compare() -> tuple[int, list[str]]:
        done = subprocess.run(
            [sys.executable, str(TOOL), "--compare", str(tmp_path), "--named", "^noise map$"],
            env={**os.environ, "FSBENCH_KERNEL_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
        assert not done.stderr
        return done.returncode, done.stdout.splitlines()

    code, lines = compare()
    assert (code, lines) == (0, ["0 differences, 1 launches in this tree"])
    path.write_text(path.read_text().replace("gumbel(bits),", "gumbel(bits) + 1.0,"))
    code, lines = compare()
    assert code == 1 and lines[0].startswith("noise_map, noise map: line ")
