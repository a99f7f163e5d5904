"""Check the length of files and the folders of tests."""

from __future__ import annotations

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


def test_folders_of_tests_mirror_the_product():
    """A folder of tests/kernels or tests/fsbench is a folder of the product."""
    for package in ("kernels", "baselines", "fsbench"):
        for folder in (ROOT / "tests" / package).rglob("*/"):
            if folder.name not in ("__pycache__",) and list(folder.glob("test_*.py")):
                mirrored = ROOT / folder.relative_to(ROOT / "tests")
                assert mirrored.is_dir(), f"{folder} mirrors no folder of the product"
