"""Reasons to doubt a measurement, each with what to do about it. Printed after a run."""

from __future__ import annotations

import pandas as pd

from fsbench.provider import Kind

_WIDE = 0.05  # relative width of the median's interval that is worth a word
_CLOCK_SPREAD = 0.02  # the same for the SM clock over the cells of one problem


def doubts(table: pd.DataFrame) -> list[str]:
    """Warnings about the measured rows of results.csv, most serious first."""
    ok = table[table["status"] == "ok"]
    found = []
    # The roof is that of a whole step; a lower bound need not do all of its work.
    samplers = ok[ok["kind"] != Kind.LOWER_BOUND]
    below = samplers[samplers["roofline_pct"].astype(float) > 100]
    if len(below):
        found.append(
            f"{_cells(below)} ran faster than the datasheet roof for reading the whole weight: "
            "unless that sampler reads a smaller copy of it (`fsbench list` has their memory), the "
            "timer or the L2 state is wrong; compare with --timer events"
        )
    throttled = ok[ok["throttle"].fillna("").str.contains("slowdown|thermal")]
    if len(throttled):
        found.append(f"{_cells(throttled)} ran while the GPU was throttled: cool it and run again")
    wide = ok[(ok["ci_hi_us"] - ok["ci_lo_us"]) > _WIDE * ok["median_us"]]
    if len(wide):
        found.append(
            f"{_cells(wide)} have a 95 % interval wider than {_WIDE:.0%}: "
            "raise --iters, or stop what else runs on this machine"
        )
    for (b, d, v), group in ok.groupby(["b", "d", "v"]):
        mhz = group["sm_mhz"].dropna().astype(float)
        if len(mhz) and (mhz.max() - mhz.min()) > _CLOCK_SPREAD * mhz.max():
            found.append(
                f"B={b} D={d} V={v}: SM clocks of the samplers differ by "
                f"{mhz.max() - mhz.min():.0f} MHz; ratios at this point carry that much doubt"
            )
    return found


def _cells(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    more = f" and {len(rows) - 1} more cells" if len(rows) > 1 else ""
    return f"{first['provider']} at B={first['b']} D={first['d']} V={first['v']}{more}"
