"""A run beside the paper's Tables 4 and 5: our speedups divided by the published ones.

A speedup is the time of a sampler that stores its logits divided by that of the fused one, both of
one run, so it can be compared across machines better than a time. But it has two ends: `better`
than the paper may be a faster fused kernel or a slower rival. Which sampler of ours stands for
which column of the paper is in paper.toml (package `fsbench.paper`).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import pandas as pd

from fsbench import paper
from fsbench.errors import ResultsError, unknown_name
from fsbench.provider import Kind
from fsbench.report.tables import Configuration

WITHIN = 0.05
"""Largest deviation that counts as agreement. Tables 5 and 6 of the paper differ by up to 6 % in
the speedups that both give (one GPU, Blackwell), and the paper does not say how it treated the L2
cache."""


class Agreement(StrEnum):
    """Our speedup against the published one."""

    AGREES = "agrees"
    BETTER = "better"
    WORSE = "worse"


def agreement(ratio: float, within: float) -> Agreement:
    """Whether our speedup / the paper's is at most `within` away from 1, above it or below."""
    if ratio > 1 + within:
        return Agreement.BETTER
    if ratio < 1 - within:
        return Agreement.WORSE
    return Agreement.AGREES


def cells(configuration: Configuration, gpu: str, fused: str) -> pd.DataFrame:
    """Published cells of one configuration's shape that are measured there, too.

    Args:
        configuration: of any GPU; the ratio says what the difference is.
        gpu: column of the paper, one of paper.GPUS.
        fused: name of the sampler that is compared with the paper's.

    Returns:
        Columns table, d, v, b, method, provider, ours, lo, hi (its interval), paper and ratio:
        ours / paper. Empty for another shape, dtype or tp than the paper's.
    """
    first = configuration.rows.iloc[0]
    published = paper.speedups(gpu)
    if (first["dtype"], first.tp) != ("bf16", 1):
        published = published[:0]
    parts = []
    for method, entry in paper.source()["baselines"].items():
        provider = entry["provider"]
        ours = configuration.ratio(provider, fused).rename(columns={"value": "ours"})
        mine = published[
            (published["d"] == first.d)
            & (published["v"] == first.v)
            & (published["method"] == method)
        ]
        parts.append(mine.assign(provider=provider).merge(ours, on="b"))
    found = pd.concat(parts, ignore_index=True)
    return found.assign(ratio=found["ours"] / found["paper"])


def spread(table: pd.DataFrame) -> float:
    """Largest / smallest `ratio` of the baselines of one B, minus 1, for the B where it is largest.

    The fused kernel's time is a factor of all of them, so it does not matter here.
    """
    ratios = table.groupby("b")["ratio"]
    return float((ratios.max() / ratios.min()).max() - 1)


def shares(configuration: Configuration, fused: str) -> pd.DataFrame:
    """Sampling as a share of kernel time beside the paper's Table 1, in percent.

    The paper's GPU is another one (an RTX 3090), and it does not say which LM head it profiled.

    Returns:
        Columns b, method, provider, ours, split_by (results.csv) and paper. No rows where nothing
        was measured that Table 1 has.
    """
    source = paper.source()
    names = {source["fused"]["method"]: fused}
    names |= {method: entry["provider"] for method, entry in source["baselines"].items()}
    columns = ["provider", "b", "matmul_us", "sampling_us", "other_us", "split_by"]
    rows = configuration.measured.reindex(columns=columns)
    rows = rows[rows["matmul_us"].notna()]
    whole = rows["matmul_us"] + rows["sampling_us"] + rows["other_us"]
    rows = rows.assign(ours=100 * rows["sampling_us"] / whole)
    table = paper.table(1)
    table = table.assign(provider=table["method"].map(names), paper=table["sampling_pct"])
    both = table.merge(rows, on=["provider", "b"])
    return both[["b", "method", "provider", "ours", "split_by", "paper"]]


def compare(
    configurations: Iterable[Configuration], gpu: str, fused: str, needed: bool = True
) -> list[tuple[Configuration, pd.DataFrame]]:
    """Every configuration that the paper has, with its `cells`.

    Raises:
        ResultsError: there is none, and it is `needed`: no other table has anything to compare.
    """
    configurations = list(configurations)
    known = {name for one in configurations for name in one.providers(Kind.EXACT, fused=True)}
    if fused not in known and known:
        raise unknown_name("--fused", fused, known)
    found = [(one, cells(one, gpu, fused)) for one in configurations]
    found = [(one, table) for one, table in found if len(table)]
    if not found and needed:
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
    return found
