"""Paths and parsed sources of this checkout."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
H200 = RESULTS / "h200"

FOLDERS = {"fsbench.kernels": "kernels", "fsbench.baselines": "baselines", "fsbench": "fsbench"}
"""Package -> folder; the first two are links in fsbench/ to folders next to it."""


def newest(name: str) -> Path:
    """Return the newest folder of a record, such as `paper`, on an H200."""
    return max(H200.glob(f"{name}-20*"))


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def modules() -> dict[str, ast.Module]:
    """Return every module of the product by its dotted name, packages included."""
    by_name = {}
    for package, folder in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            by_name[name] = parsed(path)
    return by_name
