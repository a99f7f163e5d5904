"""Lists that follow from the code: commands, options, arguments, capabilities, columns, presets.

tools/pages/words.toml describes columns and fields; a name without a description, or a
description without a name, is an error.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, asdict, fields
from functools import cache
from typing import Any

import typer
from typer.cli import get_docs_for_click

from fsbench import provider
from fsbench.cli import app
from fsbench.cli.listing import CLAIMS, claims
from fsbench.discover import discover
from fsbench.e2e import summary as e2e
from fsbench.machine.environment import environment
from fsbench.measure.presets import PRESETS
from fsbench.records import breakdown, summary
from fsbench.records.cell import COLUMNS, STATUSES, Host, Loop, Round
from fsbench.verify.check import Check
from pages.blocks import ROOT, block, table

LINE = (
    *("schema", "cell", "round", "measured", "form", "energy", "sustained", "host"),
    *("status", "lacks", "reason", "running_crc32"),
)
"""Keys of a line of points.jsonl."""


VERDICT = (
    *("schema", "environment", "setting", "provider"),
    *("skipped", "source", "package", "claims", "conclusion", "verdict", "seconds"),
)
"""Keys of a line of verify's record, in addition to those of a Check."""


def _beyond_cells(columns: Iterable[str]) -> list[str]:
    return [name for name in columns if name not in COLUMNS]


def _fields(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


NAMES: dict[str, Callable[[], list[str]]] = {
    "line": lambda: list(LINE),
    "cell": lambda: list(COLUMNS),
    "round": lambda: _fields(Round),
    "energy": lambda: _fields(Loop),
    "sustained": lambda: _fields(Loop),
    "host": lambda: _fields(Host),
    "results": lambda: _beyond_cells(summary.COLUMNS),
    "breakdown": lambda: _beyond_cells(breakdown.kernel_rows([]).columns),
    "status": lambda: list(STATUSES),
    "environment": lambda: [
        "schema",
        *environment("cpu", []),
        "options",
        "resumed",
        "lines",
        "times",
    ],
    "check": lambda: [*VERDICT, *_fields(Check)],
    "e2e": lambda: list(e2e.COLUMNS),
}
"""Section of words.toml -> the names that the code has."""


@cache
def _words() -> dict[str, dict[str, str]]:
    return tomllib.loads((ROOT / "tools/pages/words.toml").read_text(encoding="utf-8"))


def _cell(text: str) -> str:
    """Text for a cell of a table: no | that would end it, no <name> that would be a tag."""
    outside_code = re.sub(r"(`[^`]*`)|<(?=\w)", lambda match: match[1] or r"\<", text)
    return re.sub(r"(?<!\\)\|", r"\\|", outside_code)


@block
def words(section: str) -> str:
    """Return the names of the code with their descriptions in words.toml."""
    names, meanings = NAMES[section](), _words()[section]
    if set(names) != set(meanings):
        differ = ", ".join(sorted(set(names) ^ set(meanings)))
        raise KeyError(f"words.toml, [{section}]: expected the names of the code; differ: {differ}")
    return table(
        ["name", "meaning"], ([f"`{name}`", _cell(meanings[name])] for name in names), left=2
    )


def entries(text: str) -> dict[str, str]:
    """Return name -> description from the unindented lines `name: description` of a docstring."""
    descriptions = {}
    for names, description in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n .*)*)", text, re.MULTILINE):
        one_line = re.sub(r"\s+", " ", description.strip())
        for name in names.split(", "):
            descriptions[name] = one_line.replace("docs/ ", "docs/")
    return descriptions


@block
def contract(kind: str) -> str:
    """Return the fields of Provider or Capabilities, from their docstrings."""
    described = getattr(provider, kind)
    meanings = entries(inspect.getdoc(described) or "")
    rows = []
    for field in fields(described):
        default = "" if field.default is MISSING or callable(field.default) else field.default
        shown = "" if default in ("", None) else f"`{default!r}`"
        rows.append([f"`{field.name}`", shown, _cell(meanings[field.name])])
    return table(["field", "default", "meaning"], rows, left=3)


@block
def capabilities() -> str:
    """Return the capabilities of each sampler."""
    rows = []
    for entry in discover().values():
        if entry.provider is None:
            continue
        able = entry.provider.capabilities
        where = ", ".join({"cuda": "GPU", "cpu": "CPU"}[device] for device in able.devices)
        rows.append(
            [f"`{entry.name}`", where, ", ".join(able.dtypes), ", ".join(claims(asdict(able)))]
        )
    return table(["sampler", "on", "dtypes", "capabilities"], rows, left=4)


@block
def claims_in_words() -> str:
    rows = [[f"`{name}`", meaning] for name, meaning in CLAIMS.items()]
    return table(["capability", "meaning"], rows, left=2)


@block
def kernel_classes() -> str:
    rows = [[str(part), f"`{_cell(rule)}`"] for part, rule in breakdown.RULES]
    return table(["part", "names"], rows, left=2)


@block
def presets() -> str:
    rows = [
        [
            *(f"`{name}`", each.summary, each.dtype, ", ".join(map(str, each.batches))),
            *(each.warmup, each.iters, each.rounds),
        ]
        for name, each in PRESETS.items()
    ]
    heads = ["preset", "what", "dtype", "B", "warm-up steps", "timed steps", "rounds"]
    return table(heads, rows, left=4)


@block
def commands() -> str:
    """Return every command, argument and option, as `typer fsbench.cli utils docs` does."""
    command: Any = typer.main.get_command(app)
    command.commands = {k: v for k, v in command.commands.items() if not v.hidden}
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="fsbench")
    return re.sub(r"^# .*\n", "", text)
