"""Warnings about measurements, each with what to do about it. Printed after a run."""

from __future__ import annotations

import pandas as pd

from fsbench.provider import Kind

_WIDE_INTERVAL = 0.05  # width of the median's interval / median
_CLOCK_SPREAD = 0.02  # spread of the SM clock over the cells of one problem / clock


def measurement_warnings(table: pd.DataFrame) -> list[str]:
    """Return warnings about the measured rows of results.csv, most serious first."""
    columns = ("roofline_pct", "throttle", "sm_mhz")
    table = table.assign(**{name: None for name in columns if name not in table})
    ok = table[table["status"] == "ok"]
    # The roof is that of a whole step; a lower bound need not do all of its work.
    samplers = ok[ok["kind"] != Kind.LOWER_BOUND]
    above_roof = samplers[samplers["roofline_pct"].astype(float) > 100]
    throttled = ok[ok["throttle"].fillna("").astype(str).str.contains("slowdown|thermal")]
    wide = ok[(ok["ci_hi_us"] - ok["ci_lo_us"]) > _WIDE_INTERVAL * ok["median_us"]]
    warnings = [
        f"{_cells(rows)} {text}"
        for rows, text in (
            (
                above_roof,
                "ran faster than the datasheet roof for reading the whole weight: unless that "
                "sampler reads a smaller copy of it (`fsbench list` has their memory), the timer "
                "or the L2 state is wrong; compare with --timer events",
            ),
            (throttled, "ran while the GPU was throttled: cool it and run again"),
            (
                wide,
                f"have a 95 % interval wider than {_WIDE_INTERVAL:.0%}: raise --iters, or stop "
                "other programs on this machine",
            ),
        )
        if len(rows)
    ]
    for (b, d, v), group in ok.groupby(["b", "d", "v"]):
        mhz = group["sm_mhz"].dropna().astype(float)
        if len(mhz) and mhz.max() - mhz.min() > _CLOCK_SPREAD * mhz.max():
            warnings.append(
                f"B={b} D={d} V={v}: SM clocks of the samplers differ by "
                f"{mhz.max() - mhz.min():.0f} MHz; ratios at this point carry that much doubt"
            )
    return warnings


def _cells(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    more = f" and {len(rows) - 1} more cells" if len(rows) > 1 else ""
    return f"{first['provider']} at B={first['b']} D={first['d']} V={first['v']}{more}"
