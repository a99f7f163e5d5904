"""Tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import pandas as pd
    from rich.console import Console
    from rich.table import Table

Columns = list[tuple[str, str]]
"""(heading, format of its cells); see `table`."""


def console(**options: Any) -> Console:
    """Return a console that prints text unchanged, in lines of any length; options are rich's."""
    from rich.console import Console

    return Console(**{"highlight": False, "markup": False, "soft_wrap": True, **options})


def print_table(
    columns: Columns, rows: Iterable[Mapping[str, Any]], title: str | None = None
) -> None:
    """Print a table in its full width, because names and numbers must not be cut."""
    shown = table(columns, rows, title, no_wrap=True, padding=(0, 1, 0, 0))
    console(width=200, soft_wrap=False).print(shown)


def table(
    columns: Columns,
    rows: Iterable[Mapping[str, Any]],
    title: str | None = None,
    no_wrap: bool = False,
    **options: Any,
) -> Table:
    """Return a table, whose options are rich's.

    Args:
        columns: a format is like "{us:.1f}" for rows {"us": 3.14}. A cell that formats None is
            "-". Columns are aligned right, but left if the format says so, as "{name:<}".
    """
    shown = plain_table(title, **options)
    for heading, form in columns:
        shown.add_column(heading, justify="left" if "<" in form else "right", no_wrap=no_wrap)
    for row in rows:
        shown.add_row(*(_cell(form, row) for _, form in columns))
    return shown


def _cell(form: str, row: Mapping[str, Any]) -> str:
    try:
        return form.format_map(row)
    except TypeError:  # None takes no format
        return "-"


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a frame by column, with None for a missing value."""
    rows = frame.to_dict("records")
    return [{name: None if v != v else v for name, v in row.items()} for row in rows]


def split(method: str) -> str:
    """Return how kernel time was split into matmul and sampling (column `split_by`) as text."""
    return method if method == "names" else f"difference to {method} form"


def plain_table(title: str | None = None, **options: Any) -> Table:
    """Return an empty table with a rule below its headings; options are rich's."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    look: dict[str, Any] = {"title_justify": "left", "show_edge": False, "pad_edge": False}
    return Table(title=title, box=SIMPLE_HEAD, **{**look, **options})
