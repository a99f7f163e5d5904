"""The pages of the documentation, as the tests of them read them."""

from __future__ import annotations

import re

from tree import ROOT
from typer.testing import CliRunner

from fsbench.cli import app

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """The text of a page under a heading, up to the next heading of its level."""
    return text(name).split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(table: str) -> list[str]:
    """Every name in backticks in the first column of the tables in a text."""
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]


def fsbench(*arguments: object) -> str:
    """Output of a command; fails unless its exit code is 0."""
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output
