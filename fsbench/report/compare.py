"""Compare two runs cell by cell: time in B / time in A.

Cells are paired by sampler, shape and measuring conditions; GPU and commit may differ. A ratio
across runs needs the differences of the two environments next to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import pandas as pd

from fsbench.errors import ResultsError
from fsbench.records.stats import ratio_interval
from fsbench.report.tables import CONDITIONS, conditions_in_words, normalized

WITHIN = 0.02
"""Largest difference that counts as the same. An interval covers one run only: two runs of one
program on one H200, minutes apart, differ by up to 2.0 % (results/h200: `paper` and `lean`)."""

PROBLEM = ["device", "d", "v", *CONDITIONS]
"""Columns with one value in all cells of a table."""

_CELL = [*PROBLEM, "provider", "b"]
_CLOCKS = ["sm_mhz", "mem_mhz"]
_VALUES = ["status", "reason", "median_us", "ci_lo_us", "ci_hi_us", *_CLOCKS]

ABSENT = "absent"
"""Status of a cell that is not in a run."""


class Verdict(StrEnum):
    """Verdict on the interval of B / A."""

    FAST = "FAST"
    SLOW = "SLOW"
    SAME = "SAME"
    AMBIGUOUS = "AMBIGUOUS"


def verdict(lo: float, hi: float, within: float) -> Verdict:
    """Return the position of the interval [lo, hi] of B / A relative to 1 +- within."""
    if lo > 1 + within:
        return Verdict.SLOW
    if hi < 1 - within:
        return Verdict.FAST
    if lo >= 1 - within and hi <= 1 + within:
        return Verdict.SAME
    return Verdict.AMBIGUOUS


def pairs(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Return every cell of either run, sorted.

    Args:
        a, b: rows of one run each, from `cli.result_frames.read_results`.

    Returns:
        The columns of the cell; status, reason, times and clocks of both runs with suffixes _a
        and _b; and ratio, lo, hi: B / A and its conservative interval, if both are measured. The
        status is `absent` if a run does not have the cell.

    Raises:
        ResultsError: a run has no measured cell, or no cell is measured in both.
    """
    both = _rows("A", a).merge(_rows("B", b), on=_CELL, how="outer", suffixes=("_a", "_b"))
    both = both.sort_values(_CELL, ignore_index=True)
    for status in ("status_a", "status_b"):
        both[status] = both[status].fillna(ABSENT)
    measured = (both["status_a"] == "ok") & (both["status_b"] == "ok")
    if not measured.any():
        raise ResultsError(
            "compare: expected two runs with at least one cell measured in both; "
            f"A has {_shapes(a)}; B has {_shapes(b)}"
        )
    lo, hi = ratio_interval(
        (both["ci_lo_us_b"], both["ci_hi_us_b"]), (both["ci_lo_us_a"], both["ci_hi_us_a"])
    )
    ratio = both["median_us_b"] / both["median_us_a"]
    return both.join(pd.DataFrame({"ratio": ratio, "lo": lo, "hi": hi})[measured])


def _rows(name: str, run: pd.DataFrame) -> pd.DataFrame:
    """Return the compared columns, one row per cell; raise ResultsError if no cell is measured."""
    rows = normalized(run).reindex(columns=_CELL + _VALUES).drop_duplicates(_CELL, keep="last")
    if not (rows["status"] == "ok").any():
        raise ResultsError(f"{name}: expected at least one cell with status ok; got none")
    return rows


def _shapes(run: pd.DataFrame) -> str:
    """Return the shapes and samplers of a run as text, for an error message."""
    measured = normalized(run)
    measured = measured[measured["status"] == "ok"]
    heads = [
        f"D = {first.d}, V = {first.v} ({conditions_in_words(first)})"
        for _, first in measured.drop_duplicates(PROBLEM).iterrows()
    ]
    samplers = ", ".join(measured["provider"].unique())
    batches = ", ".join(map(str, sorted(measured["b"].unique())))
    return f"{'; '.join(heads)}; B {batches}; {samplers}"


def lost(cells: pd.DataFrame, run: str) -> pd.DataFrame:
    """Return the cells that failed in one run, 'a' or 'b', and were measured in the other."""
    tried = ~cells[f"status_{run}"].isin(["ok", ABSENT])
    return cells[tried & cells[["status_a", "status_b"]].eq("ok").any(axis=1)]


def only_in(cells: pd.DataFrame, run: str) -> list[tuple[str, int]]:
    """Return (samplers, B and problem; number of cells) for the cells of only one run.

    Args:
        run: 'a' or 'b', the run that has the cells.
    """
    other = {"a": "b", "b": "a"}[run]
    alone = cells[cells[f"status_{other}"] == ABSENT]
    of_samplers = alone.groupby([*PROBLEM, "provider"])["b"].agg(tuple).reset_index()
    lacking = []
    for _, same in of_samplers.groupby([*PROBLEM, "b"]):
        first = same.iloc[0]
        samplers, batches = ", ".join(same["provider"]), ", ".join(map(str, first.b))
        head = f"D = {first.d:,}, V = {first.v:,}: {conditions_in_words(first)}"
        lacking.append((f"{samplers} at B = {batches}; {head}", len(same) * len(first.b)))
    return lacking


def clock_differences(cells: pd.DataFrame) -> list[tuple[str, Any, Any]]:
    """Return (name, in A, in B) of median clocks that differ, over cells measured in both runs."""
    both = cells[cells["ratio"].notna()]
    medians = [
        (f"median {name}", *(pd.to_numeric(both[f"{name}_{run}"]).median() for run in "ab"))
        for name in _CLOCKS
    ]
    return [(name, a, b) for name, a, b in medians if abs(a - b) > 0]  # False for NaN


_RUN_FIELDS = {"schema", "utc", "argv", "options", "resumed", "times"}
"""Fields of env.json about the run, not about the machine or the programs."""


def environment_differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (name, in A, in B) of each difference between two env.json records.

    Options of `fsbench run` are named `options.NAME`; `resumed` is the number of resumes.
    """
    facts_a, facts_b = _facts(a), _facts(b)
    both = [(name, facts_a.get(name), facts_b.get(name)) for name in {**facts_a, **facts_b}]
    return [(name, x, y) for name, x, y in both if x != y]


def _facts(environment: dict[str, Any]) -> dict[str, Any]:
    facts = {name: value for name, value in environment.items() if name not in _RUN_FIELDS}
    facts["options"] = environment.get("options", {})
    return {**dict(_flat(facts)), "resumed": len(environment.get("resumed", []))}


def _flat(facts: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) of each value of a nested record, such as options.iters."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, ", ".join(map(str, value)) if isinstance(value, list) else value
