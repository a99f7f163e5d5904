"""`fsbench e2e --arrivals`: requests that arrive one by one, whether or not earlier ones are done.

The client, and a row per kind of requests, rate and sampler of what it recorded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from random import Random
from typing import Any

import numpy as np
import pandas as pd

from fsbench.e2e.records import Served
from fsbench.errors import EngineFailed, one_line
from fsbench.records.sheet import markdown_table

_KEY = ("engine", "model", "tp", "requests", "b", "sampler")
_TIMES = ("ttft", "tpot", "latency")
Ask = Callable[[int], AsyncIterator[int]]
"""Sends request number i; gives the number of new tokens whenever some arrive."""


def arrival_times(rate: float, number: int, seed: int) -> list[float]:
    """Seconds from the start at which requests of a Poisson process arrive, ascending.

    rate: requests per second, on average.
    """
    random = Random(seed)
    times, now = [], 0.0
    for _ in range(number):
        now += random.expovariate(rate)
        times.append(now)
    return times


async def open_loop(ask: Ask, times: Sequence[float], output_tokens: int) -> Served:
    """Send request i at times[i] seconds, and wait until all have their tokens.

    Raises:
        EngineFailed: a request did not get `output_tokens` tokens.
    """
    begin = time.perf_counter()

    async def one(number: int) -> tuple[float, list[float]]:
        await asyncio.sleep(begin + times[number] - time.perf_counter())
        sent, arrived = time.perf_counter() - begin, []
        async for tokens in ask(number):
            arrived += [time.perf_counter() - begin] * tokens
        return sent, arrived

    return served(times, await asyncio.gather(*map(one, range(len(times)))), output_tokens)


def served(
    due: Sequence[float], requests: Sequence[tuple[float, list[float]]], output_tokens: int
) -> Served:
    """The record of requests: (when it was sent, when each of its tokens came), all in seconds.

    A request's times count from when it was due: a client that is late adds to what it waits for.
    """
    lengths = {len(arrived) for _, arrived in requests}
    if lengths != {output_tokens} or output_tokens < 2:
        raise EngineFailed(
            f"expected {output_tokens} tokens, 2 or more, of each request; got {sorted(lengths)}"
        )
    first = np.array([arrived[0] for _, arrived in requests])
    last = np.array([arrived[-1] for _, arrived in requests])
    at = np.array(due)
    sent = np.array([each for each, _ in requests])

    def us(seconds: np.ndarray) -> list[float]:
        return [round(float(each) * 1e6, 1) for each in seconds]

    return Served(
        late_us=us(sent - at),
        ttft_us=us(first - at),
        tpot_us=us((last - first) / (output_tokens - 1)),
        latency_us=us(last - at),
        seconds=float(last.max()),
        output_tokens=output_tokens,
    )


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
