"""The published tables as data frames."""

from __future__ import annotations

from importlib import resources

import pandas as pd

from fsbench.errors import unknown_name
from fsbench.paper import GPUS, source


def table(number: int) -> pd.DataFrame:
    """Return a published table, with the columns of its CSV file."""
    with (resources.files(__package__) / f"table{number}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)


def speedups(gpu: str) -> pd.DataFrame:
    """Return the published speedups on one GPU: columns table, d, v, b, method, paper.

    `paper` is the time of `method` divided by that of the paper's fused kernel.
    """
    if gpu not in GPUS:
        raise unknown_name("--paper", gpu, GPUS)
    parts = [
        table(int(number))
        .assign(table=int(number), **shape)
        .rename(columns={gpu: "paper"})[["table", "d", "v", "b", "method", "paper"]]
        for number, shape in source()["speedups"].items()
    ]
    return pd.concat(parts, ignore_index=True)


def scaling(tp: int) -> pd.DataFrame:
    """Return the published speedups on `tp` GPUs: the columns of `speedups`.

    Empty if the paper has no times on so many GPUs.
    """
    ((number, shape),) = source()["scaling"].items()
    times, column = table(int(number)), f"tp{tp}_us"
    if column not in times:
        times = times[:0].assign(**{column: 0.0})
    is_fused = times["method"] == source()["fused"]["method"]
    fused = times["b"].map(times[is_fused].set_index("b")[column])
    ratios = times.assign(table=int(number), **shape, paper=times[column] / fused)[~is_fused]
    return ratios[["table", "d", "v", "b", "method", "paper"]]
