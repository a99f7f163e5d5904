"""Write the blocks, numbers and claims of every page again.

<!-- begin: NAME ARGUMENT ... -->    a table of tables.toml, or a block made by Python
<!-- end -->
<!--n NAME-->0.93 to 1.02<!--/-->    a number of tables.toml, filled in
words<!--c NAME-->                   a claim of tables.toml, which is recomputed
"""

from __future__ import annotations

import re
from pathlib import Path

from pages import code, special
from pages.blocks import BLOCKS, ROOT
from pages.tables import check_claim, declared, made_number, made_table

MAKERS = (code, special)
"""Importing them registers their blocks."""

BLOCK = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBER = re.compile(r"(<!--n ([\w.-]+)-->).*?(<!--/-->)", re.DOTALL)
CLAIM = re.compile(r"<!--c ([\w.-]+)-->")
AT_A_START = re.compile(r"^ *(?:[-*] |\d+\. )?<!--[nc] ", re.MULTILINE)


def pages() -> list[Path]:
    """Return the pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def made_block(words: str) -> str:
    """Return the Markdown of a block, by the words of its marker."""
    name, *arguments = words.split()
    if name in BLOCKS:
        return BLOCKS[name](*arguments)
    if name in declared()["table"] and not arguments:
        return made_table(name)
    raise KeyError(f"no block or table of this name: {words}")


def regenerated(page: Path) -> str:
    """Return the text of a page with every block and number made again, its claims checked.

    Raises:
        ValueError: a block, number or claim cannot be made; the message names it and the page.
    """
    up = "../" * len(page.parent.relative_to(ROOT).parts)

    def block(match: re.Match[str]) -> str:
        text = _located(page, match[2], made_block).strip().replace("](ROOT/", f"]({up}")
        return f"{match[1]}\n{text}\n\n{match[3]}"

    text = BLOCK.sub(block, page.read_text(encoding="utf-8"))
    if match := AT_A_START.search(text):
        line = text[: match.start() + 1].count("\n") + 1
        raise ValueError(f"{page.name}:{line}: a marker at the start of a line is HTML to GitHub")
    for name in CLAIM.findall(text):
        _located(page, name, check_claim)
    return NUMBER.sub(
        lambda match: match[1] + _located(page, match[2], made_number) + match[3], text
    )


def _located(page: Path, name: str, make):  # type: ignore[no-untyped-def]
    try:
        return make(name)
    except (KeyError, ValueError, FileNotFoundError) as error:
        raise ValueError(f"{page.relative_to(ROOT)}, {name}: {error}") from error


def main() -> None:
    """Write the pages; print the names of those that changed."""
    for path in pages():
        text = regenerated(path)
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
