"""The paper's Tables 1 and 4 to 9 as data: their only copy, as printed.

Each table is a CSV file in this folder (`fsbench.paper.tables`). paper.toml names the source of the
tables, and the sampler of fsbench that corresponds to each method of the paper.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

GPUS = ("h100", "h200", "b200", "b300")
"""Columns of Tables 4 and 5."""


@cache
def source() -> dict[str, Any]:
    """Return paper.toml: title, version, method of measurement, tables, samplers."""
    return tomllib.loads((resources.files(__package__) / "paper.toml").read_text(encoding="utf-8"))
