"""Markdown, and the sources of records, for tables, blocks and the writer of pages."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from fsbench.records.summary import read_csv
from fsbench.report.measurement_warnings import measurement_warnings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"

SMALL = (4096, 151_936)
"""D and V of the smaller of the paper's LM heads."""

POINT = {"d", "v", "b"}
"""Columns of a problem of a run."""

HOPPER, PORTABLE, MATMUL = "flash_sampling_hopper", "flash_sampling", "matmul_only"
AUTHORS = "flashsampling_authors"

BLOCKS: dict[str, Callable[..., str]] = {}
"""Name in a marker -> the function that returns the block's Markdown."""


def block(make: Callable[..., str]) -> Callable[..., str]:
    """Register a function under its name, with - for _."""
    BLOCKS[make.__name__.strip("_").replace("_", "-")] = make
    return make


def table(heads: Sequence[object], rows: Iterable[Iterable[object]], left: int = 1) -> str:
    """Return a Markdown table; the first `left` columns are texts, the others numbers."""
    rule = [":---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in (heads, rule, *rows))


def bullets(*lines: str) -> str:
    """Return a Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def span(values: Iterable[float], form: str = ".2f") -> str:
    """Return '0.93 to 1.02', or one number if both ends have the same text."""
    numbers = list(values)
    low, high = (f"{value:{form}}" for value in (min(numbers), max(numbers)))
    return low if low == high else f"{low} to {high}"


def listed(words: Iterable[object]) -> str:
    """Return '1, 2 and 3'."""
    *first, last = [*map(str, words)] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def environments(path: Path) -> list[dict[str, Any]]:
    """Return the environments of a record: one for each call that measured it.

    Args:
        path: a folder, or a file with an environment next to it, in its folder or in its lines.
    """
    for other in (path / "env.json", path.with_suffix(".env.json"), path.with_suffix(".json")):
        if other.exists() and other != path:
            record = json.loads(other.read_text(encoding="utf-8"))
            record = record.get("environment", record)
            return [record, *record.get("resumed", [])]
    if path.is_dir():
        names = [each for each in path.glob("*.jsonl") if not each.name.startswith("quantized-")]
        return [each for name in sorted(names) for each in environments(name)]
    if path.suffix == ".csv":
        return environments(path.parent)
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line["environment"] for line in lines if "environment" in line]


def measured_on(*records: str) -> str:
    """Return 'NVIDIA H200, 2026-11-21, commit 8ecc1ef': GPU (or CPU), dates and commits.

    Args:
        records: paths below results/.
    """
    measured = [each for record in records for each in environments(RESULTS / record)]
    machines = dict.fromkeys(each["gpu"] or each["cpu"] for each in measured)
    dates = sorted({each["utc"][:10] for each in measured})
    commits = dict.fromkeys(each["git_sha"][:7] for each in measured)
    days = " and ".join(dict.fromkeys((dates[0], dates[-1])))
    return f"{', '.join(machines)}, {days}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


class Shown(NamedTuple):
    """The cells of its records that a table shows.

    points: the (D, V, B); None if the rows of the table have no such columns.
    text: names of samplers, among other words; all samplers if it names none of a record.
    """

    points: frozenset[tuple[int, int, int]] | None = None
    text: str = ""

    @classmethod
    def from_rows(cls, rows: pd.DataFrame, text: str = "") -> Shown:
        """Return the points and samplers in the rows of a view, and the samplers in a text."""
        if "provider" in rows:
            text = " ".join([text, *rows.provider.astype(str).unique()])
        if not set(rows) >= POINT:
            return cls(None, text)
        return cls(frozenset(zip(rows.d, rows.v, rows.b, strict=True)), text)

    def rows_in(self, results: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of results.csv that the table shows."""
        if self.points is not None:
            points = zip(results.d, results.v, results.b, strict=True)
            results = results[[point in self.points for point in points]]
        named = [
            name
            for name in results.provider.unique()
            if re.search(rf"(?:\b|_){re.escape(name)}\b", self.text)
        ]
        return results[results.provider.isin(named)] if named else results


EVERYTHING = Shown()


def source(*records: str, shown: Shown = EVERYTHING) -> str:
    """Return what is below a table: GPU, date and commit, links to its records, their warnings.

    Several records with the same warning share a line. Warnings are about what the table shows.
    """
    folders = (Path(record).parent for record in records)
    of_a_run = [(RESULTS / folder / "env.json").exists() for folder in folders]
    sources = [
        str(Path(record).parent) if is_run else record
        for record, is_run in zip(records, of_a_run, strict=True)
    ]
    named = dict.fromkeys(sources)
    line = f"*{measured_on(*records)}. Record: {', '.join(map(_link, named))}.*"
    of_records: dict[str, list[str]] = {}
    for record in named:
        for doubt in doubts(record, shown):
            of_records.setdefault(doubt, []).append(_link(record))
    warned = [f"Warning, {', '.join(links)}: {doubt}." for doubt, links in of_records.items()]
    return f"{line}\n\n{bullets(*warned)}" if warned else line


def _link(record: str) -> str:
    return f"[{Path(record).name}](ROOT/results/{record})"


def doubts(record: str, shown: Shown) -> list[str]:
    """Return what the report doubts about a run, by its path below results/; else nothing."""
    if not (RESULTS / record / "results.csv").exists():
        return []
    return [each.doubt for each in measurement_warnings(shown.rows_in(_results(record)))]


@cache
def _results(record: str) -> pd.DataFrame:
    return read_csv(RESULTS / record)


def newest(name: str) -> str:
    """Return the path of a record below results/: h200/options/d4096 of its newest date.

    Args:
        name: a path below results/, with a date or without; without a folder, below h200/.

    Raises:
        FileNotFoundError: there is no such record.
    """
    if (RESULTS / name).exists():
        return name
    folder, _, below = name.partition("/")
    if not below:
        folder, below = "h200", name
    record, *part = below.split("/")
    dated = sorted(RESULTS.glob("/".join([folder, f"{record}-20*", *part])))
    paths = [path for path in (RESULTS / folder / below, *dated) if path.exists()]
    if not paths:
        raise FileNotFoundError(f"no record results/{name}")
    return str(paths[-1].relative_to(RESULTS))
