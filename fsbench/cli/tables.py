"""The look that tables on a terminal share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from rich.console import Console
    from rich.table import Table


def console(**options: Any) -> Console:
    """A console that prints text as it is, in lines of any length; options are rich's."""
    from rich.console import Console

    return Console(**{"highlight": False, "markup": False, "soft_wrap": True, **options})


def plain_table(
    title: str | None = None,
    headings: Iterable[str] = (),
    left: Collection[str] = (),
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
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=no_wrap)
    return table
