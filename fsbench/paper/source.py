"""Source of the published tables, and the conditions of the paper's measurements."""

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
