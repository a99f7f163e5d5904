"""Two runs, cell by cell: how much longer each cell takes in B than in A.

A ratio across runs is only as good as what the runs have in common, so the differences of their
environments belong in front of it. GPUs and commits may differ: that is what one compares. The
sampler, the shape and the way of measuring may not.
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
"""An interval covers one run only. Two runs of one program on one H200, minutes apart, differ by up
to 2.0 %, interval included (results/h200: `paper` and `lean`)."""

PROBLEM = ["device", "d", "v", *CONDITIONS]
"""Columns in which cells of one table agree."""

_CELL = [*PROBLEM, "provider", "b"]
_CLOCKS = ["sm_mhz", "mem_mhz"]
_VALUES = ["status", "reason", "median_us", "ci_lo_us", "ci_hi_us", *_CLOCKS]

ABSENT = "absent"
"""Status of a cell that a run does not have."""


class Verdict(StrEnum):
    """Verdict on the interval of B / A."""

    FAST = "FAST"
    SLOW = "SLOW"
    SAME = "SAME"
    AMBIGUOUS = "AMBIGUOUS"


def verdict(lo: float, hi: float, within: float) -> Verdict:
    """The whole interval [lo, hi] of B / A above, below or inside 1 +- within, or across an end."""
    if lo > 1 + within:
        return Verdict.SLOW
    if hi < 1 - within:
        return Verdict.FAST
    if lo >= 1 - within and hi <= 1 + within:
        return Verdict.SAME
    return Verdict.AMBIGUOUS


def pairs(a: pd.DataFrame, b: pd.DataFrame) -> pd.DataFrame:
    """Every cell that either run has, sorted.

    Args:
        a, b: the rows of one run each, as `cli.result_frames.read_results` gives them.

    Returns:
        The columns of the cell; status, reason, times and clocks of both runs with _a and _b; and
        ratio, lo, hi: B / A and its conservative interval, where both are measured. A run without
        the cell has the status `absent`.
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
    """The columns that are compared, one row per cell; raises if nothing was measured."""
    rows = normalized(run).reindex(columns=_CELL + _VALUES).drop_duplicates(_CELL, keep="last")
    if not (rows["status"] == "ok").any():
        raise ResultsError(f"{name}: expected at least one cell with status ok; got none")
    return rows


def _shapes(run: pd.DataFrame) -> str:
    """Name the shapes and samplers of a run, for the message that no cell is in both runs."""
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
    """Cells that one run, 'a' or 'b', tried and could not measure, and the other one could."""
    tried = ~cells[f"status_{run}"].isin(["ok", ABSENT])
    return cells[tried & cells[["status_a", "status_b"]].eq("ok").any(axis=1)]


def only_in(cells: pd.DataFrame, run: str) -> list[tuple[str, int]]:
    """Return (what the other run lacks, how many cells) of those that one run alone has.

    run: 'a' or 'b', the one that has them.
    """
    other = {"a": "b", "b": "a"}[run]
    alone = cells[cells[f"status_{other}"] == ABSENT]
    there = cells[cells[f"status_{other}"] != ABSENT]
    problems = set(there[PROBLEM].itertuples(index=False, name=None))
    batches = set(there[[*PROBLEM, "b"]].itertuples(index=False, name=None))
    samplers = set(there["provider"])
    reasons: dict[str, int] = {}
    for _, cell in alone.iterrows():
        problem = tuple(cell[PROBLEM])
        if cell.provider not in samplers:
            why = f"sampler {cell.provider}"
        elif problem not in problems:
            why = f"D = {cell.d:,}, V = {cell.v:,}: {conditions_in_words(cell)}"
        elif (*problem, cell.b) not in batches:
            why = f"B = {cell.b}"
        else:
            why = f"sampler {cell.provider} at B = {cell.b}"
        reasons[why] = reasons.get(why, 0) + 1
    return list(reasons.items())


def clock_differences(cells: pd.DataFrame) -> list[tuple[str, Any, Any]]:
    """Return (name, in A, in B) of median clocks that differ, over cells measured in both runs."""
    both = cells[cells["ratio"].notna()]
    medians = [
        (f"median {name}", *(pd.to_numeric(both[f"{name}_{run}"]).median() for run in "ab"))
        for name in _CLOCKS
    ]
    return [(name, a, b) for name, a, b in medians if abs(a - b) > 0]  # false where not known


_OF_EVERY_RUN = {"schema", "utc", "argv", "options", "resumed", "times"}
"""Fields of env.json that say nothing of the machine and the programs, or are taken apart below."""


def environment_differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """(name, in A, in B) of what differs between two records of `results.read_environment`.

    Options of `fsbench run` are named `options.NAME`; `resumed` is how often a run was resumed.
    """
    of_a, of_b = _facts(a), _facts(b)
    both = [(name, of_a.get(name), of_b.get(name)) for name in {**of_a, **of_b}]
    return [(name, x, y) for name, x, y in both if x != y]


def _facts(environment: dict[str, Any]) -> dict[str, Any]:
    facts = {name: value for name, value in environment.items() if name not in _OF_EVERY_RUN}
    facts["options"] = environment.get("options", {})
    return {**dict(_flat(facts)), "resumed": len(environment.get("resumed", []))}


def _flat(facts: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of what a record holds at any depth, named as in `options.iters`."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}.")
        else:
            yield above + name, ", ".join(map(str, value)) if isinstance(value, list) else value
