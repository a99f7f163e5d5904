"""Which sampler is fastest at each B, and what it saves, from measured results.

Times of different runs are never compared: all that is said of one B stands in one run. Needs no
torch and no sampler.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pandas as pd

from fsbench.analysis import logits_store
from fsbench.analysis.tables import Configuration


@dataclass(frozen=True)
class Advice:
    """The fastest sampler at one B, in microseconds of one run.

    ties: others that may be as fast: their intervals overlap.
    instead_of: the fastest of the other way, over stored logits if `best` is fused and the reverse;
        where the problem's samplers all go one way, the next. None if that was not measured.
    folder: the run.
    extra_bytes: peak memory of `best` beyond weight and hidden; None if it was not measured.
    """

    b: int
    best: str
    us: float
    ties: tuple[str, ...]
    instead_of: str | None
    instead_us: float | None
    folder: str
    extra_bytes: int | None = None

    @property
    def saves(self) -> float | None:
        """The share of the other's time that `best` saves."""
        return None if self.instead_us is None else 1 - self.us / self.instead_us


def recommend(
    configuration: Configuration, candidates: Collection[str], most_bytes: float = float("inf")
) -> list[Advice]:
    """Advice for every B at which a candidate was measured: samplers of the problem's law only.

    The run is the last of the rows that has candidates of both ways, or several where there is one
    way; or else the last with any.
    most_bytes: samplers that took more memory at a B (extra_bytes) are none for it.
    The fused kernel that also stores its logits is none: it shows what a store costs.
    """
    _, stored = logits_store.pair()
    rows = configuration.rows
    rows = rows[(rows.status == "ok") & (rows.kind == configuration.drawn)]
    one_way = rows.fused.nunique() == 1
    rows = rows[rows.provider.isin(set(candidates) - {stored})]
    if "peak_extra_bytes" not in rows:
        rows = rows.assign(peak_extra_bytes=float("nan"))
    rows = rows[rows.peak_extra_bytes.fillna(0) <= most_bytes]
    return [_advice(int(B), _last_run(same, one_way), one_way) for B, same in rows.groupby("b")]


def _last_run(rows: pd.DataFrame, one_way: bool) -> pd.DataFrame:
    several = rows.groupby("folder")["provider" if one_way else "fused"].transform("nunique") > 1
    rows = rows[several] if several.any() else rows
    return rows[rows.folder == rows.folder.iloc[-1]]


def _advice(B: int, rows: pd.DataFrame, one_way: bool) -> Advice:
    rows = rows.sort_values("median_us", kind="stable")
    best, others = rows.iloc[0], rows.iloc[1:]
    rivals = others if one_way else others[others.fused != best.fused]
    rival = None if rivals.empty else rivals.iloc[0]
    return Advice(
        b=B,
        best=best.provider,
        us=float(best.median_us),
        ties=tuple(others[others.ci_lo_us <= best.ci_hi_us].provider),
        instead_of=None if rival is None else rival.provider,
        instead_us=None if rival is None else float(rival.median_us),
        folder=best.folder,
        extra_bytes=None if pd.isna(best.peak_extra_bytes) else int(best.peak_extra_bytes),
    )
