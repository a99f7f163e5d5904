"""Derived from the samples of `fsbench e2e`: one row per model, batch size and sampler."""

from __future__ import annotations

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
    *("reduction_pct", "reduction_sd_pct", "draw_us", "matmul_us", "rest_us", "gap_us"),
    *("amdahl_pct", "possible_pct", "reached"),
    *("profiles", "gpu_tpot_ms", "gpu_reduction_pct", "gpu_reduction_sd_pct"),
    *("accepted", "draft_us", "draft_draw_pct", "same_pct"),
)
"""Of e2e.csv; docs/guide/vllm.md says what each is."""


def summary(lines: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """A row per case, in the order in which the cases first appear; see COLUMNS."""
    cases: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in lines:
        case = {"requests": PLAIN, "drafts": 0, **line["case"]}
        if "counts" in line or "served" in line:
            continue
        found = cases.setdefault(
            tuple(case[name] for name in _KEY),
            {"case": case, "runs": {}, "profiles": {}, "drafts": [], "status": "ok", "reason": ""},
        )
        if "decoded" in line:
            found["runs"][line["run"]] = line["decoded"]
        elif "profile" in line:
            found["profiles"][line.get("run", 0)] = line["profile"]
        elif "drafting" in line:
            found["drafts"].append(line["drafting"])
        else:
            found["status"], found["reason"] = line["status"], line["reason"]
    baselines = {key[:-1]: found for key, found in cases.items() if found["case"]["baseline"]}
    rows = [_row(found, baselines.get(key[:-1])) for key, found in cases.items()]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _row(found: dict[str, Any], baseline: dict[str, Any] | None) -> dict[str, Any]:
    runs, profiles, profile = found["runs"], found["profiles"], typical(found["profiles"])
    row = {**found["case"], "status": found["status"], "reason": found["reason"]}
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
    if first.get("accepted") is not None:
        row["accepted"] = median(run["accepted"] for run in runs.values())
    if first.get("same_pct") is not None:
        row["same_pct"] = min(run["same_pct"] for run in runs.values())
    if found["drafts"]:
        row["draft_us"] = median(each["us"] for each in found["drafts"])
        shares = [100 * each["draw_us"] / each["us"] for each in found["drafts"]]
        row["draft_draw_pct"] = median(shares)
    if baseline is not None and found is not baseline and not is_reference(row):
        row |= _saved("reduction", "tpot_us", runs, baseline["runs"])
    if profile:
        row |= {name: profile[name] for name in ("draw_us", "matmul_us", "rest_us")}
        if row["device"] == "cuda":
            row["gap_us"] = median(tpot_us) - profile["busy_us"]
            row |= {"profiles": len(profiles), "gpu_tpot_ms": profile["busy_us"] / 1e3}
            if baseline is not None and found is not baseline:
                row |= _saved("gpu_reduction", "busy_us", profiles, baseline["profiles"])
    return row | _bounds(row, baseline)


def is_reference(row: Mapping[str, Any] | pd.Series) -> bool:
    """Return whether a row of the summary timed a fused sampler's reference, which runs on CPUs."""
    return bool(row["fused"] and row["device"] != "cuda")


def _saved(
    name: str, of: str, runs: dict[int, dict[str, Any]], base: dict[int, dict[str, Any]]
) -> dict[str, float]:
    """Percent saved of a time, against the baseline's run of the same number."""
    both = sorted(runs.keys() & base.keys())
    saved = [100 * (1 - runs[number][of] / base[number][of]) for number in both]
    if not saved:
        return {}
    spread = stdev(saved) if len(saved) > 1 else 0.0
    return {f"{name}_pct": median(saved), f"{name}_sd_pct": spread}


def typical(profiles: dict[int, dict[str, Any]]) -> dict[str, Any] | None:
    """Of each time of a case's profiles the median; None without any."""
    if not profiles:
        return None
    names = ("draw_us", "matmul_us", "rest_us", "busy_us")
    times = {name: [each[name] for each in profiles.values()] for name in names}
    return {name: None if None in found else median(found) for name, found in times.items()}


def _bounds(row: dict[str, Any], baseline: dict[str, Any] | None) -> dict[str, Any]:
    """What the baseline's profile says can be gained, and how much of it was."""
    if baseline is None or not baseline["runs"] or not baseline["profiles"]:
        return {}
    if row["device"] != "cuda":  # there a profiled step takes longer than the step itself
        return {}
    base = typical(baseline["profiles"])
    assert base is not None
    tpot_us = median(run["tpot_us"] for run in baseline["runs"].values())
    found = {}
    if base["matmul_us"] is not None:
        found["amdahl_pct"] = 100 * (base["draw_us"] - base["matmul_us"]) / tpot_us
    if "reduction_pct" in row and "draw_us" in row:
        possible = found["possible_pct"] = 100 * (base["draw_us"] - row["draw_us"]) / tpot_us
        if possible > 0:
            found["reached"] = row["reduction_pct"] / possible
    return found


def step_quantiles(
    runs: Iterable[dict[str, Any]], b: int, levels: Iterable[float]
) -> tuple[float, ...]:
    """Quantiles of the time between two tokens of a request, over all tokens of all runs, us.

    A step counts as often as it delivered tokens.
    """
    times: list[float] = []
    weights: list[int] = []
    for run in runs:
        times += run["step_us"]
        weights += run["step_tokens"] or [b] * len(run["step_us"])
    order = np.argsort(times)
    share = np.cumsum(np.array(weights)[order])
    at = [int(np.searchsorted(share, level * share[-1])) for level in levels]
    return tuple(float(np.array(times)[order][index]) for index in at)
