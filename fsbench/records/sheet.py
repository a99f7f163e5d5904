"""Tables as text: CSV that a spreadsheet shows and never computes, and Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

import pandas as pd

_FORMULA = re.compile(r"[\s\0\ufeff]*[=+\-@\uff1d\uff0b\uff0d\uff20]")
"""Text that some spreadsheet computes: the full-width forms of =, +, - and @ count too."""


def as_csv(table: pd.DataFrame, **options: Any) -> str:
    """Return a table as CSV; a text that would be a formula gets an apostrophe in front."""
    texts = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    guarded = {name: table[name].map(without_formula) for name in texts}
    return str(table.assign(**guarded).to_csv(float_format="%.6g", **options))


def without_formula(value: Any) -> Any:
    """Return a cell's value, with an apostrophe in front if it is text that would be a formula."""
    return f"'{value}" if isinstance(value, str) and _FORMULA.match(value) else value


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, all columns aligned to the right, with escaped texts."""
    lines = [headings, ["---:"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)


def filled(templates: str, row: Mapping[str, Any], missing: str = "") -> str:
    """Fill the first of the formats, separated by " || ", whose values a row has.

    Args:
        missing: the text if each format shows a value that the row lacks.
    """
    for template in templates.split(" || "):
        if not any(pd.isna(row[name]) for name in shown_names(template)):
            return template.format_map(row)
    return missing


def shown_names(template: str) -> set[str]:
    """Return the names of the values that a format shows."""
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def escaped(text: str) -> str:
    """Return text for Markdown that ends no cell and no line and begins no tag, link or code."""
    line = " ".join(text.split("\n"))
    return re.sub(r"([\\|`]|\[(?=[^\]]*\]\())", r"\\\1", line).replace("<", "&lt;")
