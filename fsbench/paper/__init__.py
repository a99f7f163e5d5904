"""The paper's Tables 1 and 4 to 9 as data: their only copy, as printed.

Each is a CSV file beside this one; paper.toml says what they are copied from, and which sampler of
ours stands for which method of the paper.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from fsbench.late import late

if TYPE_CHECKING:
    from fsbench.paper.tables import speedups as speedups
    from fsbench.paper.tables import table as table

GPUS = ("h100", "h200", "b200", "b300")
"""Columns of Tables 4 and 5."""


@cache
def source() -> dict[str, Any]:
    """paper.toml: title, version, how the paper measured, what its tables are, samplers."""
    return tomllib.loads((resources.files(__name__) / "paper.toml").read_text(encoding="utf-8"))


# Their functions return frames of pandas, which takes half a second to load.
__getattr__ = late(__name__, tables=("speedups", "table"))
