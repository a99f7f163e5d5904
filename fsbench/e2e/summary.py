"""Summarize the samples of `fsbench e2e`: one row per model, batch size and sampler."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median, stdev
from typing import Any

import numpy as np
import pandas as pd

from fsbench.e2e.models import PLAIN
from fsbench.errors import one_line

_KEY = ("engine", "model", "tp", "requests", "b", "sampler")

COLUMNS = (
    *("engine", "model", "d", "v", "dtype", "tp", "b", "sampler", "label", "fused", "baseline"),
    *("requests", "drafts"),
    *("device", "gpu", "status", "reason", "runs", "prompt_tokens", "output_tokens"),
    *("tpot_ms", "tpot_min_ms", "tpot_max_ms", "step_p95_ms", "step_p99_ms", "tokens_per_s"),
    *("itl_ms", "itl_reduction_pct", "itl_reduction_sd_pct"),
    *("reduction_pct", "reduction_sd_pct", "draw_us", "matmul_us", "rest_us", "gap_us"),
    *("amdahl_pct", "possible_pct", "reached"),
    *("profiles", "gpu_tpot_ms", "gpu_reduction_pct", "gpu_reduction_sd_pct"),
    *("accepted", "draft_us", "draft_draw_pct", "same_pct"),
)
"""Columns of e2e.csv; docs/reference/results-format.md explains them."""


def summary(lines: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Return a row with COLUMNS per case, in the order in which the cases first appear."""
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        case = {"requests": PLAIN, "drafts": 0, **line["case"]}
        if "counts" in line:
            continue
        entry = cases.setdefault(
            tuple(case[name] for name in _KEY),
            {"case": case, "runs": {}, "profiles": {}, "drafts": [], "status": "ok", "reason": ""},
        )
        if "decoded" in line:
            entry["runs"][line.get("run", 0)] = line["decoded"]
        elif "profile" in line:
            entry["profiles"][line.get("run", 0)] = line["profile"]
        elif "drafting" in line:
            entry["drafts"].append(line["drafting"])
        else:
            entry["status"], entry["reason"] = line["status"], line.get("reason", "")
    baselines = {key[:-1]: entry for key, entry in cases.items() if entry["case"]["baseline"]}
    rows = [_row(entry, baselines.get(key[:-1])) for key, entry in cases.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(entry: dict[str, Any], baseline: dict[str, Any] | None) -> dict[str, Any]:
    runs, profiles, profile = entry["runs"], entry["profiles"], median_profile(entry["profiles"])
    row = {**entry["case"], "status": entry["status"], "reason": entry["reason"]}
    row["label"] = one_line(row["label"])
    row["runs"] = len(runs)
    if not runs:
        return row
    first = next(iter(runs.values()))
    tpot_us = [run["tpot_us"] for run in runs.values()]
    p95, p99 = step_quantiles(runs.values(), row["b"], (0.95, 0.99))
    row |= {
        "prompt_tokens": first["prompt_tokens"],
        "output_tokens": first["output_tokens"],
        "tpot_ms": median(tpot_us) / 1e3,
        "tpot_min_ms": min(tpot_us) / 1e3,
        "tpot_max_ms": max(tpot_us) / 1e3,
        "step_p95_ms": p95 / 1e3,
        "step_p99_ms": p99 / 1e3,
        "tokens_per_s": row["b"] * 1e6 / median(tpot_us),
    }
    itl_us = _median_steps(entry)
    if first.get("accepted") is not None:
        row["accepted"] = median(run["accepted"] for run in runs.values())
    else:
        row["itl_ms"] = median(itl_us.values()) / 1e3
    if first.get("same_pct") is not None:
        row["same_pct"] = min(run["same_pct"] for run in runs.values())
    if entry["drafts"]:
        row["draft_us"] = median(each["us"] for each in entry["drafts"])
        shares = [100 * each["draw_us"] / each["us"] for each in entry["drafts"]]
        row["draft_draw_pct"] = median(shares)
    if baseline is not None and entry is not baseline and not is_reference(row):
        row |= saved("reduction", _times(runs, "tpot_us"), _times(baseline["runs"], "tpot_us"))
        if "itl_ms" in row:
            row |= saved("itl_reduction", itl_us, _median_steps(baseline))
    if profile:
        row |= {name: profile[name] for name in ("draw_us", "matmul_us", "rest_us")}
        if row["device"] == "cuda":
            row["gap_us"] = median(tpot_us) - profile["busy_us"]
            row |= {"profiles": len(profiles), "gpu_tpot_ms": profile["busy_us"] / 1e3}
            if baseline is not None and entry is not baseline:
                busy = [_times(each, "busy_us") for each in (profiles, baseline["profiles"])]
                row |= saved("gpu_reduction", *busy)
    return row | _bounds(row, baseline)


def is_reference(row: Mapping[str, Any] | pd.Series) -> bool:
    """Return whether a row timed the reference of a fused sampler, which runs on CPUs."""
    return bool(row["fused"] and row["device"] != "cuda")


def _times(runs: dict[int, dict[str, Any]], name: str) -> dict[int, float]:
    return {number: run[name] for number, run in runs.items()}


def _median_steps(entry: dict[str, Any]) -> dict[int, float]:
    """Return the median time between two tokens of each run, in us."""
    b = entry["case"]["b"]
    return {number: step_quantiles([run], b, (0.5,))[0] for number, run in entry["runs"].items()}


def saved(name: str, us: dict[int, float], base_us: dict[int, float]) -> dict[str, float]:
    """Return {name_pct, name_sd_pct}: the percent of a time that is saved, run by run.

    One pair of runs has no standard deviation.

    Args:
        us, base_us: times of a sampler and of the baseline by number of the run.
    """
    both = sorted(us.keys() & base_us.keys())
    percents = [100 * (1 - us[number] / base_us[number]) for number in both]
    if not percents:
        return {}
    spread = stdev(percents) if len(percents) > 1 else math.nan
    return {f"{name}_pct": median(percents), f"{name}_sd_pct": spread}


def median_profile(profiles: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Return the median of each time over a case's profiles; None without a profile."""
    if not profiles:
        return None
    names = ("draw_us", "matmul_us", "rest_us", "busy_us")
    times = {name: [each[name] for each in profiles.values()] for name in names}
    return {name: None if None in values else median(values) for name, values in times.items()}


def _bounds(row: dict[str, Any], baseline: dict[str, Any] | None) -> dict[str, Any]:
    """Return the savings that the profiles allow, and the part of them that was reached."""
    if baseline is None or not baseline["runs"] or not baseline["profiles"]:
        return {}
    if row["device"] != "cuda":  # on a CPU a profiled step takes longer than the step itself
        return {}
    base = median_profile(baseline["profiles"])
    assert base is not None
    tpot_us = median(run["tpot_us"] for run in baseline["runs"].values())
    bounds = {}
    if base["matmul_us"] is not None:
        bounds["amdahl_pct"] = 100 * (base["draw_us"] - base["matmul_us"]) / tpot_us
    if "reduction_pct" in row and "draw_us" in row:
        possible = bounds["possible_pct"] = 100 * (base["draw_us"] - row["draw_us"]) / tpot_us
        if possible > 0:
            bounds["reached"] = row["reduction_pct"] / possible
    return bounds


def step_quantiles(
    runs: Iterable[dict[str, Any]], b: int, levels: Iterable[float]
) -> tuple[float, ...]:
    """Return quantiles of the time between two tokens of a request, over all runs, in us.

    A step counts once per token that it delivered.
    """
    times: list[float] = []
    weights: list[int] = []
    for run in runs:
        times += run["step_us"]
        weights += run["step_tokens"] or [b] * len(run["step_us"])
    order = np.argsort(times)
    share = np.cumsum(np.array(weights)[order])
    indices = np.searchsorted(share, [level * share[-1] for level in levels])
    return tuple(np.array(times)[order][indices].tolist())
