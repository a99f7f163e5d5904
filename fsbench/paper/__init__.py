"""The paper's Tables 1 and 4 to 9 as data: their only copy, as printed.

Each is a CSV file beside this one; paper.toml says what they are copied from, and which sampler of
ours stands for which method of the paper.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from fsbench.errors import unknown_name

if TYPE_CHECKING:
    import pandas as pd

GPUS = ("h100", "h200", "b200", "b300")
"""Columns of Tables 4 and 5."""


@cache
def source() -> dict[str, Any]:
    """paper.toml: title, version, how the paper measured, what its tables are, samplers."""
    return tomllib.loads((resources.files(__name__) / "paper.toml").read_text(encoding="utf-8"))


def table(number: int) -> pd.DataFrame:
    """One published table, with the columns of its CSV file."""
    import pandas as pd

    with (resources.files(__name__) / f"table{number}.csv").open(encoding="utf-8") as file:
        return pd.read_csv(file)


def speedups(gpu: str) -> pd.DataFrame:
    """Every published speedup on one GPU: columns table, d, v, b, method, paper.

    `paper` is the time of `method` divided by that of the paper's fused kernel.
    """
    import pandas as pd

    if gpu not in GPUS:
        raise unknown_name("--paper", gpu, GPUS)
    parts = [
        table(int(number))
        .assign(table=int(number), **shape)
        .rename(columns={gpu: "paper"})[["table", "d", "v", "b", "method", "paper"]]
        for number, shape in source()["speedups"].items()
    ]
    return pd.concat(parts, ignore_index=True)
