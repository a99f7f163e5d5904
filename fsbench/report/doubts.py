"""Reasons to doubt a measurement, each with what to do about it. Printed after a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from fsbench.provider import Kind

_WIDE = 0.05  # relative width of the median's interval that is worth a word
_CLOCK_SPREAD = 0.02  # the same for the SM clock over the cells of one problem


@dataclass(frozen=True)
class Doubt:
    """A reason to doubt some cells.

    reason: "roof" (faster than the datasheet allows), "throttled", "interval" (a wide one) or
        "clocks" (SM clocks of the samplers of one point differ).
    cells: (provider, B, D, V) of each.
    mhz: of "clocks", how far the clocks are apart; 0 of others.
    text: a sentence for a reader.
    """

    reason: str
    cells: tuple[tuple[str, int, int, int], ...]
    text: str
    mhz: float = 0.0

    def __str__(self) -> str:
        return self.text


def doubts(table: pd.DataFrame) -> list[Doubt]:
    """Return the doubts about the measured rows of results.csv, most serious first."""
    columns = ("roofline_pct", "throttle", "sm_mhz")
    table = table.assign(**{name: None for name in columns if name not in table})
    ok = table[table["status"] == "ok"]
    warnings = []
    # The roof is that of a whole step; a lower bound need not do all of its work.
    samplers = ok[ok["kind"] != Kind.LOWER_BOUND]
    below = samplers[samplers["roofline_pct"].astype(float) > 100]
    if len(below):
        warnings.append(
            _doubt(
                "roof",
                below,
                "{} ran faster than the datasheet roof for reading the whole weight: unless that "
                "sampler reads a smaller copy of it (`fsbench list` has their memory), the timer "
                "or the L2 state is wrong; compare with --timer events",
            )
        )
    throttled = ok[ok["throttle"].fillna("").astype(str).str.contains("slowdown|thermal")]
    if len(throttled):
        text = "{} ran while the GPU was throttled: cool it and run again"
        warnings.append(_doubt("throttled", throttled, text))
    wide = ok[(ok["ci_hi_us"] - ok["ci_lo_us"]) > _WIDE * ok["median_us"]]
    if len(wide):
        text = f"{{}} have a 95 % interval wider than {_WIDE:.0%}: raise --iters, or stop what else"
        warnings.append(_doubt("interval", wide, text + " runs on this machine"))
    for (b, d, v), group in ok.groupby(["b", "d", "v"]):
        mhz = group["sm_mhz"].dropna().astype(float)
        apart = mhz.max() - mhz.min() if len(mhz) else 0.0
        if len(mhz) and apart > _CLOCK_SPREAD * mhz.max():
            text = (
                f"B={b} D={d} V={v}: SM clocks of the samplers differ by {apart:.0f} MHz; "
                "ratios at this point carry that much doubt"
            )
            warnings.append(Doubt("clocks", _cells(group.loc[mhz.index]), text, float(apart)))
    return warnings


def doubtful(warnings: Iterable[Doubt], B: int, D: int, V: int) -> list[Doubt]:
    """Return the doubts about any sampler at one point, for a mark beside its numbers."""
    return [each for each in warnings if any(cell[1:] == (B, D, V) for cell in each.cells)]


def _doubt(reason: str, rows: pd.DataFrame, text: str) -> Doubt:
    first = rows.iloc[0]
    more = f" and {len(rows) - 1} more cells" if len(rows) > 1 else ""
    named = f"{first['provider']} at B={first['b']} D={first['d']} V={first['v']}{more}"
    return Doubt(reason, _cells(rows), text.format(named))


def _cells(rows: pd.DataFrame) -> tuple[tuple[str, int, int, int], ...]:
    columns = zip(rows["provider"], rows["b"], rows["d"], rows["v"], strict=True)
    return tuple((str(name), int(b), int(d), int(v)) for name, b, d, v in columns)
