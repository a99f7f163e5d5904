"""Warnings about measurements: printed after a run, and below each table that is made of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from fsbench.provider import Kind

_WIDE_INTERVAL = 0.05  # width of the median's interval / median
_CLOCK_SPREAD = 0.02  # spread of the SM clock over the cells of one problem / clock


@dataclass(frozen=True)
class MeasurementWarning:
    """A reason to distrust measurements of a run.

    doubt: which cells, and what is wrong with them.
    advice: what to do about it, or what it means.
    """

    doubt: str
    advice: str

    def __str__(self) -> str:
        return f"{self.doubt}: {self.advice}"


def measurement_warnings(table: pd.DataFrame) -> list[MeasurementWarning]:
    """Return warnings about the measured rows of results.csv, most serious first, one a kind."""
    columns = ("roofline_pct", "throttle", "sm_mhz")
    table = table.assign(**{name: None for name in columns if name not in table})
    ok = table[table["status"] == "ok"]
    # The roof is that of reading the whole weight; a lower bound and a screen need not do that.
    smaller = (ok["kind"] == Kind.LOWER_BOUND) | ok["provider"].str.contains("screened")
    samplers = ok[~smaller]
    above_roof = samplers[samplers["roofline_pct"].astype(float) > 100]
    throttled = ok[ok["throttle"].fillna("").astype(str).str.contains("slowdown|thermal")]
    wide = ok[(ok["ci_hi_us"] - ok["ci_lo_us"]) > _WIDE_INTERVAL * ok["median_us"]]
    warnings = [
        MeasurementWarning(f"{text}: {_cells(rows)}", advice)
        for rows, text, advice in (
            (
                above_roof,
                "Faster than the datasheet roof for reading the whole weight",
                "the timer or the L2 state is wrong, or the sampler reads a smaller copy of the "
                "weight (`fsbench list` has the memory of each); compare with --timer events",
            ),
            (throttled, "The GPU was throttled", "cool it and run again"),
            (
                wide,
                f"95 % interval wider than {100 * _WIDE_INTERVAL:.0f} %",
                "raise --iters, or stop other programs on this machine",
            ),
        )
        if len(rows)
    ]
    return warnings + _different_clocks(ok)


def _different_clocks(ok: pd.DataFrame) -> list[MeasurementWarning]:
    """Return the warning about problems whose samplers ran at different SM clocks, if any."""
    clocks = ok.dropna(subset="sm_mhz").astype({"sm_mhz": float})
    of_a_problem = clocks.groupby(["d", "v", "b"])["sm_mhz"]
    highest, lowest = of_a_problem.max(), of_a_problem.min()
    spread = (highest - lowest)[highest - lowest > _CLOCK_SPREAD * highest]
    if spread.empty:
        return []
    capped = clocks["throttle"].fillna("").astype(str).str.contains("power_cap")
    limited = clocks[capped].set_index(["d", "v", "b"]).index.isin(spread.index).any()
    heads = [
        ", ".join(
            f"{mhz:.0f} MHz at B = {_listed(of_mhz.index.get_level_values('b'))}"
            for mhz, of_mhz in of_head.groupby(of_head, sort=False)
        )
        + _head(*head)
        for head, of_head in spread.groupby(level=["d", "v"], sort=False)
    ]
    text = "SM clocks of the samplers differ" + (", some limited by power" if limited else "")
    advice = "ratios at these points carry that much doubt"
    return [MeasurementWarning(f"{text}: {'; '.join(heads)}", advice)]


def _cells(rows: pd.DataFrame) -> str:
    """Return the cells by LM head and B: 'a, b at B = 1, 2; c at B = 1 (D = 64, V = 1000)'."""
    heads = []
    for head, of_head in rows.groupby(["d", "v"], sort=False):
        samplers: dict[str, list[str]] = {}
        for name, cells in of_head.groupby("provider", sort=False):
            samplers.setdefault(_listed(cells["b"]), []).append(name)
        named = [f"{', '.join(names)} at B = {sizes}" for sizes, names in samplers.items()]
        heads.append("; ".join(named) + _head(*head))
    return "; ".join(heads)


def _head(d: int, v: int) -> str:
    return f" (D = {d}, V = {v})"


def _listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(set(sizes))))
