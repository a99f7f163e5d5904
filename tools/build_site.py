"""Copy the pages for the documentation site, with links that work there: what `make site` runs.

README.md becomes the first page, and the folders of docs/ the sections. Figures are copied. A link
to another file of the repository (a record, a source file) becomes its text and its path.

    python tools/build_site.py && mkdocs build --strict
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "build" / "pages"
RENAMED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def site_path(path: str) -> str | None:
    """Return where a file of the repository is on the site, or None if it is not there."""
    if path in RENAMED:
        return RENAMED[path]
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    return path if path.endswith((".png", ".svg")) else None


def site_text(page: str, text: str) -> str:
    """Return the Markdown of a page with the links of the site.

    Args:
        page: the page's path in the repository.
        text: its Markdown.
    """
    folder = os.path.dirname(str(site_path(page))) or "."

    def link(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if target.startswith("#") or re.match(r"[a-z]+:", target):
            return match[0]
        path, _, anchor = target.partition("#")
        repository_path = os.path.normpath(os.path.join(os.path.dirname(page), path))
        target_path = site_path(repository_path)
        if target_path is None:
            return (
                f"{label} (`{repository_path}`)" if label.strip("`") != repository_path else label
            )
        relative = os.path.relpath(target_path, folder)
        return f"{mark}[{label}]({relative}{'#' if anchor else ''}{anchor})"

    return LINK.sub(link, text)


def pages() -> list[str]:
    """Return the paths of the site's pages in the repository."""
    below = sorted((ROOT / "docs").rglob("*.md"))
    return [*RENAMED, *(path.relative_to(ROOT).as_posix() for path in below)]


def main() -> None:
    """Write the pages and copy the figures into build/pages."""
    shutil.rmtree(OUTPUT, ignore_errors=True)
    for page in pages():
        path = OUTPUT / str(site_path(page))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(site_text(page, (ROOT / page).read_text(encoding="utf-8")), "utf-8")
    shutil.copytree(ROOT / "plots", OUTPUT / "plots")
    shutil.copy(ROOT / "docs" / "site.css", OUTPUT)


if __name__ == "__main__":
    main()
