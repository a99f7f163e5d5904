"""Tables on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table


def console(**options: Any) -> Console:
    """Return a console that prints text unchanged, in lines of any length; options are rich's."""
    from rich.console import Console

    return Console(**{"highlight": False, "markup": False, "soft_wrap": True, **options})


def print_table(
    headings: Iterable[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    left_columns: Collection[str] = ("sampler", "vs", "verdict", "split by"),
) -> None:
    """Print a table in its full width, because names and numbers must not be cut.

    Args:
        left_columns: headings of columns of text; columns of numbers are aligned right.
    """
    table = plain_table(title, headings, left_columns, no_wrap=True, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console(width=200, soft_wrap=False).print(table)


def split(method: str) -> str:
    """Return how kernel time was split into matmul and sampling (column `split_by`) as text."""
    return method if method == "names" else f"difference to {method} form"


def interval(value: float, lo: float, hi: float, digits: int) -> str:
    """Return a value with its interval, as '1.03 [1.01, 1.05]'."""
    return f"{value:.{digits}f} [{lo:.{digits}f}, {hi:.{digits}f}]"


def plain_table(
    title: str | None = None,
    headings: Iterable[str] = (),
    left_columns: Collection[str] = (),
    no_wrap: bool = False,
    **options: Any,
) -> Table:
    """Return an empty table with a rule below its headings; options are rich's.

    Args:
        left_columns: headings of columns of text; columns of numbers are aligned right.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    look: dict[str, Any] = {"title_justify": "left", "show_edge": False, "pad_edge": False}
    table = Table(title=title, box=SIMPLE_HEAD, **{**look, **options})
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in left_columns else "right", no_wrap=no_wrap
        )
    return table
