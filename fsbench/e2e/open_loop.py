"""Derived from the samples of `fsbench e2e --arrivals`: a row per kind, rate and sampler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from fsbench.errors import one_line
from fsbench.records.sheet import markdown_table

_KEY = ("engine", "model", "tp", "requests", "b", "sampler")
_TIMES = ("ttft", "tpot", "latency")


def open_loop_summary(lines: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Percentiles over all requests of all runs, ms; empty if nothing arrived by itself.

    rate: requests per second that were meant to arrive. served_rate: requests of a run by its
    seconds, median over runs. late_p99_ms: how late the client sent them.
    """
    found: dict[tuple[Any, ...], tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for line in lines:
        if "served" in line:
            key = (*(line["case"][name] for name in _KEY), line["rate"])
            found.setdefault(key, (line["case"], []))[1].append(line["served"])
    return pd.DataFrame([_row(case, key[-1], runs) for key, (case, runs) in found.items()])


def _row(case: dict[str, Any], rate: float, runs: list[dict[str, Any]]) -> dict[str, Any]:
    def quantile(name: str, level: float) -> float:
        return float(np.quantile(np.concatenate([run[f"{name}_us"] for run in runs]), level)) / 1e3

    return {
        **{name: case[name] for name in _KEY},
        "label": one_line(case["label"]),
        "rate": rate,
        "runs": len(runs),
        "requests_per_run": len(runs[0]["ttft_us"]),
        "output_tokens": runs[0]["output_tokens"],
        "served_rate": float(np.median([len(run["ttft_us"]) / run["seconds"] for run in runs])),
        **{
            f"{name}_p{100 * level:.0f}_ms": quantile(name, level)
            for name in _TIMES
            for level in (0.5, 0.95, 0.99)
        },
        "late_p99_ms": quantile("late", 0.99),
    }


def open_loop_markdown(frame: pd.DataFrame) -> str:
    """A table per model and kind of requests."""
    parts = []
    for (engine, model, tp, kind), rows in frame.groupby(
        ["engine", "model", "tp", "requests"], sort=False
    ):
        first = rows.iloc[0]
        parts.append(f"## {model} in {engine}, TP {tp}, {kind} requests that arrive by themselves")
        parts.append(
            f"Poisson arrivals, {first.requests_per_run} requests of {first.output_tokens} tokens "
            f"in each of {rows.runs.max()} interleaved runs; at most B run at a time. ms, median / "
            "99th percentile over requests, from when a request was due."
        )
        heads = ["B", "rate, 1/s", "sampler", "served, 1/s", "TTFT", "TPOT", "latency"]
        lines = [
            [
                *(str(row["b"]), f"{row['rate']:g}", str(row["label"])),
                f"{row['served_rate']:.2f}",
                *(f"{row[f'{name}_p50_ms']:.2f} / {row[f'{name}_p99_ms']:.2f}" for name in _TIMES),
            ]
            for _, row in rows.sort_values(["b", "rate"], kind="stable").iterrows()
        ]
        parts.append(markdown_table(heads, lines))
    return "\n\n".join(parts) + "\n"
