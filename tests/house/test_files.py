"""Check the length of files, the folders of tests, and that device constants have one value."""

from __future__ import annotations

import ast
from collections import defaultdict

from tree import FOLDERS, ROOT, parsed


def test_no_file_is_longer_than_400_lines():
    folders = (*FOLDERS.values(), "tools", "examples", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert not {path: length for path, length in lengths.items() if length > 400}


def test_folders_of_tests_mirror_the_product():
    wrong = []
    for package in ("kernels", "baselines", "fsbench"):
        folders = {path.parent for path in (ROOT / "tests" / package).rglob("test_*.py")}
        wrong += [
            path for path in folders if not (ROOT / path.relative_to(ROOT / "tests")).is_dir()
        ]
    assert not wrong, "these folders mirror no folder of the product"


def test_no_name_of_a_device_constant_has_two_values():
    """Triton's cache key of a kernel contains the constants of all functions that it calls.

    Constants of one name are in the order of their modules in memory, which differs between
    processes. With two values the key differs too, and a process misses the cache.
    """
    values: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for folder in ("kernels", "baselines"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in parsed(path).body:
                match node:
                    case ast.Assign([ast.Name(name)], ast.Call(function, [value])):
                        if ast.unparse(function) in ("tl.constexpr", "gl.constexpr"):
                            values[name][ast.unparse(value)].append(str(path))
    assert len(values) > 60
    assert not {name: dict(files) for name, files in values.items() if len(files) > 1}
