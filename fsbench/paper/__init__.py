"""The paper's Tables 1 and 4 to 9 as data: their only copy, as printed.

Each table is a CSV file in this folder. paper.toml names the source of the tables, and the sampler
of fsbench that corresponds to each method of the paper.
"""

import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from fsbench.lazy import lazy_getattr

if TYPE_CHECKING:
    from fsbench.paper.tables import speedups as speedups
    from fsbench.paper.tables import table as table

__all__ = ["GPUS", "source", "speedups", "table"]

# Frames of pandas, which takes half a second to load.
if not TYPE_CHECKING:  # to mypy a name that is not imported above is an error
    __getattr__ = lazy_getattr(__name__, tables=("speedups", "table"))

GPUS = ("h100", "h200", "b200", "b300")
"""Columns of Tables 4 and 5."""


@cache
def source() -> dict[str, Any]:
    """Return paper.toml: title, version, method of measurement, tables, samplers."""
    return tomllib.loads((resources.files(__package__) / "paper.toml").read_text(encoding="utf-8"))
