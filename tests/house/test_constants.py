"""A constant of the kernels has one value wherever its name stands."""

from __future__ import annotations

import ast
from collections import defaultdict

from tree import ROOT

MADE = ("tl.constexpr", "gl.constexpr")


def constants() -> dict[str, dict[str, list[str]]]:
    """Of each name of a device constant: its values, as they are written, and the files of each."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder in ("kernels", "baselines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                match node:
                    case ast.Assign([ast.Name(name)], ast.Call(func, [value])):
                        if ast.unparse(func) in MADE:
                            where = str(path.relative_to(ROOT))
                            found[name][ast.unparse(value)].append(where)
    return found


def test_no_name_of_a_device_constant_has_two_values():
    """Triton's key of a kernel has the constants of all functions that it calls, by their names.

    Those of one name follow each other as their modules happen to lie in memory. With two values a
    kernel has two keys, and about every second process compiles what the cache has.
    """
    found = constants()
    assert len(found) > 60
    assert not {name: dict(values) for name, values in found.items() if len(values) > 1}
