"""How long files are, where tests stand, and what of the checkout is installed."""

from __future__ import annotations

import tomllib

from tree import FOLDERS, ROOT


def test_no_file_is_longer_than_400_lines():
    folders = (*FOLDERS.values(), "tools", "examples", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    long = {
        str(path.relative_to(ROOT)): count
        for path in paths
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > 400
    }
    assert not long


def test_tests_stand_where_what_they_test_stands():
    """A folder of tests/kernels or tests/fsbench is a folder of the product."""
    for package in ("kernels", "baselines", "fsbench"):
        for folder in (ROOT / "tests" / package).rglob("*/"):
            if folder.name not in ("__pycache__",) and list(folder.glob("test_*.py")):
                mirrored = ROOT / folder.relative_to(ROOT / "tests")
                assert mirrored.is_dir(), f"{folder} tests nothing"


def test_every_data_file_is_installed():
    """A wheel has what the checkout has."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = config["package-data"]["fsbench"]
    data = {path for pattern in patterns for path in (ROOT / "fsbench").glob(pattern)}
    data |= {p for pattern in patterns for p in (ROOT / "kernels").glob(pattern)}
    files = {path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.*")}
    files = {path for path in files if "__pycache__" not in path.parts}
    assert data == {path for path in files if path.suffix not in (".py", ".pyc", ".so")}
