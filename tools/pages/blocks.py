"""The registry of blocks, and what they share: tables, records and where those come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
H200 = RESULTS / "h200"

SMALL, LARGE = (4096, 151_936), (8192, 128_256)
"""D and V of the paper's LM heads."""
STEMS = {4096: "h200_d4096_v151936", 8192: "h200_d8192_v128256"}

HOPPER, PORTABLE, MATMUL, STREAM = (
    *("flash_sampling_hopper", "flash_sampling", "matmul_only", "weight_stream"),
)
ONE_PASS, FI2, FI2_LEAN, FI1 = (
    *("gumbel_argmax", "flashinfer_gumbel", "flashinfer_gumbel_lean", "flashinfer_top_k_top_p"),
)

BLOCKS: dict[str, Callable[..., str]] = {}
"""Name in a marker -> what makes the Markdown of the block; the marker's other words are given."""


def block(make: Callable[..., str]) -> Callable[..., str]:
    """Register a function under its name, with - for _."""
    BLOCKS[make.__name__.replace("_", "-")] = make
    return make


def table(heads: Sequence[object], rows: Iterable[Iterable[object]], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are texts, the others numbers."""
    rule = [":---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rule, *rows))


def bullets(*lines: str) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """'0.93 to 1.02', or one number where both ends are written alike."""
    found = list(values)
    low, high = (f"{value:{form}}" for value in (min(found), max(found)))
    return low if low == high else f"{low} to {high}"


def said(words: str, so: object) -> str:
    """Words that a page says of records, if they are so.

    Raises:
        ValueError: they are not: the page needs other words.
    """
    if not so:
        raise ValueError(f"the records do not say: {words}")
    return words


def listed(words: Iterable[object]) -> str:
    """'1, 2 and 3'."""
    *some, last = map(str, words)
    return f"{', '.join(some)} and {last}" if some else last


@cache
def results(*runs: str) -> pd.DataFrame:
    """The measured cells of runs, one below the other, with the run as a column; see `place`."""
    tables = [pd.read_csv(RESULTS / place(run) / "results.csv").assign(run=run) for run in runs]
    found = pd.concat(tables, ignore_index=True)
    return found[found.status == "ok"]


def medians(*runs: str) -> pd.Series[float]:
    """Median times in us by provider, D and B."""
    return results(*runs).set_index(["provider", "d", "b"]).median_us.sort_index()


def environments(path: Path) -> list[dict[str, Any]]:
    """What a record was measured on: of a folder, of a file beside it, or of lines of its own.

    Several where the record was made in several calls.
    """
    for beside in (path / "env.json", path.with_suffix(".env.json")):
        if beside.exists():
            found = json.loads(beside.read_text(encoding="utf-8"))
            return [found, *found.get("resumed", [])]
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return [json.loads(text)["environment"]]
    lines = map(json.loads, text.splitlines())
    return [line["environment"] for line in lines if "environment" in line]


def measured_on(*records: str) -> str:
    """'NVIDIA H200, 2026-11-21, commit 8ecc1ef': GPU (or CPU), dates and commits of records.

    Args:
        records: paths below results/.
    """
    found = [each for record in records for each in environments(RESULTS / record)]
    machines = dict.fromkeys(each["gpu"] or each["cpu"] for each in found)
    dates = sorted({each["utc"][:10] for each in found})
    commits = dict.fromkeys(
        each["git_sha"][:7] + (" with uncommitted changes" if each["git_dirty"] else "")
        for each in found
    )
    days = " and ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{', '.join(machines)}, {days}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def source(*records: str) -> str:
    """One line below a table: what its records were measured on, and links to them."""
    links = (f"[{Path(record).name}](ROOT/results/{record})" for record in records)
    return f"*{measured_on(*records)}. Record: {', '.join(links)}.*"


def with_source(text: str, *records: str) -> str:
    """A block and its source."""
    return f"{text}\n\n{source(*records)}"


def place(run: str) -> str:
    """The path of a record below results/: of the H200, unless it begins with another folder."""
    return run if (RESULTS / run).exists() else f"h200/{run}"


def places(*runs: str) -> list[str]:
    """Their paths below results/, for `source`."""
    return [place(run) for run in runs]
