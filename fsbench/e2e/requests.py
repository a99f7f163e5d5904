"""The kinds of requests of `fsbench e2e`: requests.toml."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from fsbench.errors import unknown_name

PLAIN = "plain"


@cache
def kinds() -> dict[str, tuple[dict[str, Any], ...]]:
    """Kind -> what its requests ask for, in turn."""
    text = (resources.files(__package__) / "requests.toml").read_text(encoding="utf-8")
    entries = tomllib.loads(text)
    return {
        name: tuple(entries[each] for each in entry.get("of", [name]))
        for name, entry in entries.items()
    }


def check_kind(name: str) -> str:
    """The name itself; an unknown one raises InvalidArgument with the nearest known one."""
    if name not in kinds():
        raise unknown_name("requests", name, kinds())
    return name


def parameters(kind: str, row: int, seed: int) -> dict[str, Any]:
    """Of SamplingParams, for the request number `row` of a batch."""
    in_turn = kinds()[kind]
    given = dict(in_turn[row % len(in_turn)])
    return given | ({"seed": seed + row} if given.pop("seeded", False) else {})
