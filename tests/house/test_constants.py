"""Check that a device constant has one value in all files that define it."""

from __future__ import annotations

import ast
from collections import defaultdict

from tree import ROOT

CONSTANT_TYPES = ("tl.constexpr", "gl.constexpr")


def constants() -> dict[str, dict[str, list[str]]]:
    """Return name -> value as written -> files, for each device constant."""
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder in ("kernels", "baselines"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                match node:
                    case ast.Assign([ast.Name(name)], ast.Call(func, [value])):
                        if ast.unparse(func) in CONSTANT_TYPES:
                            where = str(path.relative_to(ROOT))
                            values[name][ast.unparse(value)].append(where)
    return values


def test_no_name_of_a_device_constant_has_two_values():
    """Triton's cache key of a kernel contains the constants of all functions that it calls.

    Constants of one name are in the order of their modules in memory, which differs between
    processes. With two values the key differs too, and a process misses the cache.
    """
    values = constants()
    assert len(values) > 60
    assert not {name: dict(files) for name, files in values.items() if len(files) > 1}
