"""Tables as text: CSV that a spreadsheet shows and never computes, and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

_COMPUTED = ("=", "+", "-", "@", "\t", "\r")


def as_csv(table: pd.DataFrame, **options: Any) -> str:
    """A table as CSV; a text that would be a formula gets an apostrophe in front."""

    def shown(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and value.startswith(_COMPUTED) else value

    texts = [name for name in table if not pd.api.types.is_numeric_dtype(table[name])]
    guarded = {name: table[name].map(shown) for name in texts}
    return str(table.assign(**guarded).to_csv(float_format="%.6g", **options))


def markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, all columns aligned to the right; its texts stay in their cells."""
    lines = [headings, ["---:"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(map(escaped, line)) + " |" for line in lines)


def escaped(text: str) -> str:
    """A text that neither ends a cell of Markdown nor begins a tag."""
    return text.replace("|", "\\|").replace("<", "&lt;")
