"""Cells made up for tests: of a sampler on an H200, unless something else is asked for."""

from __future__ import annotations

from typing import Any

from fsbench.records.cell import Cell

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
    return Cell.of({**_COLUMNS, **changes})
