"""The tables of docs/exactness.md from records of `fsbench verify --output`, in Markdown.

python tools/exactness_tables.py results/h200/verify/*.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def read(paths: list[Path]) -> list[Record]:
    """The checks of records; of one that was run twice, the later verdict."""
    latest: dict[tuple[str, str], Record] = {}
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "verdict" in line:
                latest[line["provider"], line["name"]] = line
    return list(latest.values())


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def verdicts(checks: list[Record]) -> str:
    """One row per sampler: how many checks passed, those that did not, in words, and the time."""
    rows = []
    for provider in dict.fromkeys(check["provider"] for check in checks):
        mine = [check for check in checks if check["provider"] == provider]
        ok = sum(check["verdict"] == "ok" for check in mine)
        other = [
            f"{check['name']}: {check['verdict']} ({check['detail']})"
            for check in mine
            if check["verdict"] != "ok"
        ]
        took = f"{sum(check['seconds'] for check in mine):.0f} s"
        rows.append([f"`{provider}`", f"{ok} of {len(mine)}", took, "; ".join(other) or "none"])
    return table(["sampler", "ok", "took", "not exact, or failed"], rows)


def tails(checks: list[Record]) -> str:
    """Share of the tail's probability that was drawn, by gap."""
    found = [check for check in checks if check["name"].startswith("tail ")]
    gaps = sorted({float(check["name"].split()[1]) for check in found})
    share = {
        (check["provider"], float(check["name"].split()[1])): f"{check['statistic']:.3g}"
        for check in found
    }
    rows = [
        [f"`{provider}`", *(share.get((provider, gap), "") for gap in gaps)]
        for provider in dict.fromkeys(check["provider"] for check in found)
    ]
    return table(["drawn / exact", *(f"gap {gap:g}" for gap in gaps)], rows)


def variations(checks: list[Record]) -> str:
    """Draws of the large vocabulary, and the bound on the total variation if it is exact there."""
    rows = [
        [
            f"`{check['provider']}`",
            f"{check['draws']:.3g}",
            f"{check['bound']:.2g}" if check["bound"] else check["verdict"],
        ]
        for check in checks
        if check["name"] == "variation"
    ]
    return table(["sampler", "draws", "total variation below"], rows)


if __name__ == "__main__":
    given = read([Path(name) for name in sys.argv[1:]])
    print("\n\n".join((verdicts(given), tails(given), variations(given))))
