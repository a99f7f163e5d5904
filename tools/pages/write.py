"""Write every block of every page anew."""

from __future__ import annotations

import re
from pathlib import Path

from pages import (
    claims,
    code,
    cpu,
    engines,
    exact,
    filters,
    forms,
    heads,
    mismatch,
    picture,
    ranks,
    released,
    screen,
    speculation,
    speed,
    split,
)
from pages.blocks import BLOCKS, ROOT

MAKERS = (
    *(
        claims,
        code,
        cpu,
        engines,
        exact,
        filters,
        forms,
        heads,
        mismatch,
        ranks,
        released,
        screen,
        speculation,
        speed,
        split,
    ),
)
"""Importing them registers their blocks."""

MARKED = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def pages() -> list[Path]:
    """The pages that may have blocks."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def regenerated(page: Path) -> str:
    """The text of a page with every block made anew."""
    up = "../" * len(page.parent.relative_to(ROOT).parts)

    def made(found: re.Match[str]) -> str:
        name, *arguments = found[2].split()
        text = BLOCKS[name](*arguments).strip().replace("](ROOT/", f"]({up}")
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return MARKED.sub(made, page.read_text(encoding="utf-8"))


def main() -> None:
    """Write the pages and the picture; print the names of those that changed."""
    new = {page: regenerated(page) for page in pages()} | {picture.PATH: picture.svg()}
    for path, text in new.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
