"""The look that tables on a terminal share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from rich.console import Console
    from rich.table import Table


def console(**options: Any) -> Console:
    """A console that prints text as it is, in lines of any length; options are rich's."""
    from rich.console import Console

    return Console(**{"highlight": False, "markup": False, "soft_wrap": True, **options})


def print_table(
    headings: Iterable[str],
    rows: Iterable[Sequence[str]],
    title: str | None = None,
    left_columns: Collection[str] = ("sampler", "vs", "verdict", "split by"),
) -> None:
    """Print a table as wide as it needs: cut names and figures would be worse than long lines.

    left: the headings of columns of words; those of numbers are aligned to the right.
    """
    table = plain_table(title, headings, left_columns, no_wrap=True, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row)
    console(width=200, soft_wrap=False).print(table)


def split(method: str) -> str:
    """Return in words how kernel time was split into matmul and sampling (column `split_by`)."""
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
    """An empty table with a rule below its headings and no other lines; options are rich's.

    left: the headings of columns of words; those of numbers are aligned to the right.
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
