"""Compare a run with the paper's Tables 4, 5 and 6: our speedups divided by the published ones.

A speedup is the time of a sampler that stores its logits divided by the time of the fused sampler
in the same run, so it compares across machines better than a time does. `better` than the paper
can mean a faster fused kernel or a slower baseline. paper.toml (package `fsbench.paper`) maps the
columns of the paper to our samplers.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import pandas as pd

from fsbench import paper
from fsbench.errors import ResultsError
from fsbench.paper import tables
from fsbench.report.tables import Configuration

WITHIN = 0.05
"""Largest deviation that counts as agreement. Speedups printed in both Table 5 and Table 6 of the
paper (one GPU, Blackwell) differ by up to 6 %, and the paper does not state the L2 state."""


class Agreement(StrEnum):
    """Result of comparing our speedup with the published one."""

    AGREES = "agrees"
    BETTER = "better"
    WORSE = "worse"


def agreement(ratio: float, within: float) -> Agreement:
    """Return whether our speedup / the paper's is within 1 +- `within`, above or below."""
    if ratio > 1 + within:
        return Agreement.BETTER
    if ratio < 1 - within:
        return Agreement.WORSE
    return Agreement.AGREES


def cells(configuration: Configuration, gpu: str, fused: str) -> pd.DataFrame:
    """Return the published cells that a configuration measured too.

    Args:
        configuration: results of one LM head on any GPU.
        gpu: column of the paper, one of paper.GPUS.
        fused: name of the sampler to compare with the paper's fused kernel.

    Returns:
        Columns table, d, v, b, method, provider, ours, lo, hi (its interval), paper and ratio
        (ours / paper). Empty if the paper has no table for this shape, dtype and tp.
    """
    first = configuration.rows.iloc[0]
    published = tables.speedups(gpu)
    if (first["dtype"], first.tp) != ("bf16", 1):
        published = published[:0]
    return _beside(published, configuration, fused)


def cells_over_ranks(configuration: Configuration, fused: str) -> pd.DataFrame:
    """Return the cells of Table 6, as speedups, that a configuration on 1 to 8 GPUs measured too.

    The paper prints lowest times, ours are medians, and it does not say which GPU it used.

    Returns:
        The columns of `cells`. Empty if the table has no such shape, dtype or number of GPUs.
    """
    first = configuration.rows.iloc[0]
    published = tables.scaling(first.tp)
    return _beside(published if first["dtype"] == "bf16" else published[:0], configuration, fused)


def _beside(published: pd.DataFrame, configuration: Configuration, fused: str) -> pd.DataFrame:
    """Return published speedups (columns as tables.speedups) next to those that were measured."""
    first, parts = configuration.rows.iloc[0], []
    for method, entry in paper.source()["baselines"].items():
        provider = entry["provider"]
        speedups = configuration.ratio(provider, fused).rename(columns={"value": "ours"})
        same_shape = published[
            (published["d"] == first.d)
            & (published["v"] == first.v)
            & (published["method"] == method)
        ]
        parts.append(same_shape.assign(provider=provider).merge(speedups, on="b"))
    table = pd.concat(parts, ignore_index=True)
    return table.assign(ratio=table["ours"] / table["paper"])


def spread(table: pd.DataFrame) -> float:
    """Return the largest spread over B of `ratio` among the baselines of one B, minus 1.

    The fused kernel's time is a factor of all ratios of one B, so it cancels.
    """
    ratios = table.groupby("b")["ratio"]
    return float((ratios.max() / ratios.min()).max() - 1)


def compare(
    configurations: Iterable[Configuration], gpu: str
) -> list[tuple[Configuration, pd.DataFrame]]:
    """Return (configuration, its `cells`) for each configuration that is in the paper.

    Raises:
        ResultsError: no configuration is in the paper.
    """
    configurations = list(configurations)
    fused = paper.source()["fused"]["provider"]
    compared = [(one, cells(one, gpu, fused)) for one in configurations]
    compared = [(one, table) for one, table in compared if len(table)]
    if not compared:
        shapes = " or ".join(
            f"D = {shape['d']}, V = {shape['v']}" for shape in paper.source()["speedups"].values()
        )
        got = "; ".join(
            f"{one.title}, {one.conditions}: {', '.join(one.providers())}" for one in configurations
        )
        baselines = ", ".join(one["provider"] for one in paper.source()["baselines"].values())
        raise ResultsError(
            f"results: expected bf16, {shapes}, {fused} and one of {baselines}, "
            f"measured in one run; got {got or 'no cell'}"
        )
    return compared
