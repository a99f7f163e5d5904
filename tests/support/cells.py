"""Cells and rows of results for tests, by default of a sampler on an H200."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from fsbench.records.cell import Cell, CellRecord
from fsbench.report.tables import Configuration, configurations

_COLUMNS = dict(
    provider="fast",
    label="Fast",
    kind="exact",
    fused=True,
    gpu="NVIDIA H200",
    timer="cupti",
    graph=True,
    l2="cold",
    device="cuda",
    b=2,
    d=100,
    v=1000,
    dtype="bf16",
)


def cell(**changes: Any) -> Cell:
    """A cell; changes are columns of results.csv."""
    return Cell.from_columns({**_COLUMNS, **changes})


def results_row(
    provider: str, b: int, median: float, spread: float = 0.1, **changes: Any
) -> dict[str, Any]:
    """A row of results.csv whose interval is this part of the median to either side."""
    return {
        **_COLUMNS,
        **dict(provider=provider, label=f"Label of {provider}", fused=False, b=b),
        **dict(d=4096, v=151936, tp=1, temperature=1.0, logits="normal:1"),
        **dict(status="ok", reason="", folder="run1", gb_per_s=1.0, tflops=1.0),
        **dict(median_us=median, ci_lo_us=(1 - spread) * median, ci_hi_us=(1 + spread) * median),
        **changes,
    }


CELL = cell()
OTHER = cell(provider="slow", label="Slow", fused=False)
MACHINE = {"gpu": "NVIDIA H200", "device": "cuda", "cpu": "some CPU"}


def numbers(records: list[CellRecord]) -> dict[str, list[int]]:
    """Sampler -> the rounds that it has."""
    return {record.cell.provider: sorted(record.rounds) for record in records}


def only(rows: Iterable[dict[str, Any]]) -> Configuration:
    """Return the one configuration of these rows."""
    (configuration,) = configurations(pd.DataFrame(rows))
    return configuration
