"""Print what `fsbench compare` shows: environments, cells side by side, and the summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsbench import paper as published
from fsbench.cli.tables import print_table
from fsbench.records.stats import LEVEL
from fsbench.report import against_paper
from fsbench.report import compare as runs
from fsbench.report.tables import conditions_in_words

if TYPE_CHECKING:
    import pandas as pd

    from fsbench.report.tables import Configuration

_RATIO = "{ratio:.3f} [{lo:.3f}, {hi:.3f}]"


def print_environments(
    folders: Sequence[Path], records: Sequence[dict[str, Any]], cells: pd.DataFrame
) -> None:
    """Print both runs, and the differences of their machines, programs, options and clocks."""
    for name, folder, record in zip("AB", folders, records, strict=True):
        commit = (record.get("git_sha") or "unknown")[:7]
        changed = ", with changes" if record.get("git_dirty") else ""
        print(f"{name}: {folder}, {record.get('utc')}, commit {commit}{changed}")
    differences = runs.environment_differences(*records) + runs.clock_differences(cells)
    print("\nThe environments differ in" if differences else "\nThe environments do not differ.")
    for name, a, b in differences:
        print(f"  {name}: {a} in A, {b} in B")


def print_runs(cells: pd.DataFrame, margin: float) -> None:
    """Print the rows of `runs.pairs` by problem, then the unpaired cells and the counts."""
    measured = cells[cells["ratio"].notna()]
    verdicts = [
        runs.verdict(lo, hi, margin) for lo, hi in zip(measured["lo"], measured["hi"], strict=True)
    ]
    measured = measured.assign(verdict=verdicts)
    for _, group in measured.groupby(runs.PROBLEM):
        first = group.iloc[0]
        print(f"\nD = {first.d:,}, V = {first.v:,}: {conditions_in_words(first)}\n")
        columns = [
            *(("sampler", "{provider:<}"), ("B", "{b}")),
            *(("A, us", "{median_us_a:.1f}"), ("B, us", "{median_us_b:.1f}")),
            *((f"B / A [{LEVEL:.0%}]", _RATIO), ("verdict", "{verdict:<}")),
        ]
        print_table(columns, group.to_dict("records"))
    print()
    for run, other in ("ab", "ba"):
        for line in lost_in_words(cells, other):
            print(line)
        for samplers, count in runs.only_in(cells, run):
            print(f"only in {run.upper()}, {count} cells: {samplers}")
    counts = ", ".join(f"{verdicts.count(one)} {one}" for one in runs.Verdict)
    print(
        f"{len(measured)} cells in both: {counts}. SAME: the interval of B / A lies within "
        f"{100 * margin:g} % of 1; FAST and SLOW: beyond that; AMBIGUOUS: across its edge."
    )


def slow_in_words(cells: pd.DataFrame, limit: float) -> list[str]:
    """Return a text for each cell whose interval of B / A is above 1 + limit."""
    return [
        f"{_name(cell)}: B / A = {_RATIO.format_map(cell)}"
        for _, cell in cells[cells["lo"] > 1 + limit].iterrows()
    ]


def lost_in_words(cells: pd.DataFrame, run: str) -> list[str]:
    """Return a text for each cell of `runs.lost`."""
    return [
        f"{_name(cell)}: not measured in {run.upper()}: "
        f"{cell[f'status_{run}']}, {cell[f'reason_{run}']}"
        for _, cell in runs.lost(cells, run).iterrows()
    ]


def _name(cell: pd.Series) -> str:
    return f"{cell.provider}, B = {cell.b}, D = {cell.d}, V = {cell.v}"


def print_sources(gpu: str) -> None:
    """Print the paper's reference, and our sampler for each of its methods."""
    source = published.source()
    print(f"Paper: {source['title']} ({source['version']}), {source['url']}")
    print(f"  {gpu.upper()}; {source['measuring']}\n")
    print("The paper's methods, and which samplers of ours are compared with them:")
    for method, entry in {
        source["fused"]["method"]: source["fused"],
        **source["baselines"],
    }.items():
        print(f"  {method}: {entry['provider']} ({entry['note']})")


def print_speedups(
    compared: list[tuple[Configuration, pd.DataFrame]], gpu: str, margin: float
) -> None:
    """Print the result of `against_paper.compare`."""
    baselines = published.source()["baselines"]
    for configuration, cells in compared:
        print(f"\nTable {cells['table'].iloc[0]}, {gpu.upper()}; ours: {configuration.title}")
        print(f"  {configuration.conditions}\n")
        columns = [
            *(("vs", "{method:<}"), ("B", "{b}")),
            *((f"ours [{LEVEL:.0%}]", "{ours:.2f} [{lo:.2f}, {hi:.2f}]"), ("paper", "{paper:.2f}")),
            *(("ours / paper", "{ratio:.3f}"), ("verdict", "{verdict:<}")),
        ]
        verdicts = [against_paper.agreement(ratio, margin) for ratio in cells["ratio"]]
        print_table(columns, cells.assign(verdict=verdicts).to_dict("records"))
        missing = [name for name in baselines if name not in set(cells["method"])]
        if missing:
            print(f"not in these results: {', '.join(missing)}")


def print_summary(tables: list[pd.DataFrame], margin: float) -> None:
    """Print a summary of all cells of `against_paper.compare`, and the spread of the baselines."""
    import pandas as pd

    cells = pd.concat(tables)
    verdicts = [against_paper.agreement(ratio, margin) for ratio in cells["ratio"]]
    agree, better, worse = (verdicts.count(one) for one in against_paper.Agreement)
    print(
        f"\n{len(cells)} cells: {agree} agree within {100 * margin:g} %, {better} better, {worse} "
        f"worse. Ours / paper: median {cells['ratio'].median():.3f}, "
        f"from {cells['ratio'].min():.3f} to {cells['ratio'].max():.3f}."
    )
    spread = max(map(against_paper.spread, tables))
    if spread == 0:  # one baseline: its part cannot be separated from the fused kernel's
        return
    print(
        f"The baselines of one table and B differ by up to {100 * spread:.1f} % in ours / paper: "
        "what goes beyond is due to the fused kernel, or to the matmul that the baselines share."
    )
