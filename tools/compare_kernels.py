"""Compares the machine code of two trees' kernels, instruction by instruction; needs no GPU.

    python tools/compare_kernels.py OLD_TREE NEW_TREE [--only FAMILY ...] [--quick]

A tree is a checkout with tools/kernel_variants. Every variant on that list is compiled, with that
tree's fsbench, for the GPUs it is for; variants of the same name are compared: registers, memory,
and every opcode with its operands. The exit code is 1 if one differs, or is missing on one side. So
a change of the code that is to change no kernel can be held to it:

    git worktree add /tmp/before HEAD~1
    python tools/compare_kernels.py /tmp/before .

A tree from before there was a list is given one: copy tools/kernel_variants there, and put what its
files import (and the names of modules in their calls of `kernel`) back to what it was then.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from kernel_compiler import Compiled, compile_variants


def first_difference(old: Sequence[str], new: Sequence[str]) -> tuple[int, str, str] | None:
    """(place, one, the other) of the first that two lists of instructions have different."""
    for place, (one, other) in enumerate(zip_longest(old, new, fillvalue="the end")):
        if one != other:
            return place, one, other
    return None


def report(old: list[Compiled], new: list[Compiled]) -> Iterator[tuple[bool, str]]:
    """Lines of (whether all in it is well, text): a table by family, then what is different."""
    before = {compiled.title: compiled for compiled in old}
    after = {compiled.title: compiled for compiled in new}
    families: dict[str, list[str]] = defaultdict(list)
    for title, compiled in (before | after).items():
        families[compiled.family].append(title)
    notes = []
    header = ("variants", "identical", "different", "missing", "instructions")
    yield True, " ".join([f"{'family':24}", *(f"{word:>12}" for word in header)])
    total = [0] * len(header)
    for family, titles in sorted(families.items()):
        counts = [len(titles), 0, 0, 0, 0]
        for title in titles:
            if title not in before or title not in after:
                counts[3] += 1
                notes.append(f"{title}: only in the {'old' if title in before else 'new'} tree")
                continue
            instructions = after[title].instructions
            counts[4] += len(instructions) - 1  # the first is what the kernel takes
            found = first_difference(before[title].instructions, instructions)
            if found is None:
                counts[1] += 1
            else:
                counts[2] += 1
                place, one, other = found
                notes.append(f"{title}: instruction {place}\n    old  {one}\n    new  {other}")
        yield counts[0] == counts[1], _row(family, counts)
        total = [sum(pair) for pair in zip(total, counts, strict=True)]
    yield True, _row("total", total)
    for note in notes:
        yield False, note


def _row(name: str, counts: Sequence[int]) -> str:
    return " ".join([f"{name:24}", *(f"{count:12,}" for count in counts)])


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare two trees' kernels by instruction.")
    parser.add_argument("old", type=Path, help="a checkout")
    parser.add_argument("new", type=Path, help="another")
    parser.add_argument("--only", nargs="+", default=[], metavar="FAMILY", help="of kernels")
    parser.add_argument("--quick", action="store_true", help="one variant of each kernel")
    given = parser.parse_args()
    try:
        old, new = (
            compile_variants(tree, given.only, quick=given.quick, instructions=True)
            for tree in (given.old, given.new)
        )
    except RuntimeError as error:
        sys.exit(f"{error}")
    well = True
    for fine, line in report(old, new):
        well &= fine
        print(line)
    if not old or not new:
        sys.exit("no variants: is --only the name of a family?")
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
