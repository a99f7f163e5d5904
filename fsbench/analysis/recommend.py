"""Which exact sampler is fastest at each B, and what it saves, from measured results.

Times of different runs are never compared: every sampler is set against one that shares its run,
the one that most runs have (analysis.tables.Configuration.ratio). Needs no torch and no sampler.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pandas as pd

from fsbench.analysis import logits_store
from fsbench.analysis.tables import Configuration
from fsbench.provider import Kind


@dataclass(frozen=True)
class Advice:
    """The fastest sampler at one B.

    ties: others that may be as fast: their intervals overlap.
    instead_of: the fastest of the other way, over stored logits if `best` is fused and the reverse;
        None if only one way was measured. saved_us: its time less that of `best`.
    extra_bytes: peak memory of `best` beyond weight and hidden; None if it was not measured.
    """

    b: int
    best: str
    us: float
    ties: tuple[str, ...]
    instead_of: str | None
    saved_us: float | None
    extra_bytes: int | None = None


def recommend(
    configuration: Configuration, candidates: Collection[str], most_bytes: float = float("inf")
) -> list[Advice]:
    """Advice for every B at which a candidate was measured; exact samplers only.

    most_bytes: samplers that took more memory at a B (extra_bytes) are none for it.
    The fused kernel that also stores its logits is none: it shows what a store costs.
    """
    _, stored = logits_store.pair()
    exact = [name for name in configuration.providers(Kind.EXACT) if name != stored]
    fused = set(configuration.providers(Kind.EXACT, fused=True))
    names = [name for name in exact if name in candidates]
    if not names:
        return []
    rows = configuration.measured
    shared = configuration.rows[configuration.rows.status == "ok"].groupby("provider").size()
    reference = max(names, key=lambda name: shared[name])
    us = rows[rows.provider == reference].set_index("b").median_us
    ratios = {name: _against(configuration, name, reference) for name in names}
    extra = _extra_bytes(rows)
    found = []
    for B in sorted(us.index):
        here = {
            name: table.loc[B]
            for name, table in ratios.items()
            if B in table.index and extra.get((name, B), 0) <= most_bytes
        }
        if not here:
            continue
        best = min(here, key=lambda name: here[name].value)
        others = [name for name in here if (name in fused) != (best in fused)]
        rival = min(others, key=lambda name: here[name].value, default=None)
        found.append(
            Advice(
                b=int(B),
                best=best,
                us=float(us[B] * here[best].value),
                ties=tuple(
                    name for name in here if name != best and here[name].lo <= here[best].hi
                ),
                instead_of=rival,
                saved_us=float(us[B] * (here[rival].value - here[best].value)) if rival else None,
                extra_bytes=extra.get((best, B)),
            )
        )
    return found


def _extra_bytes(rows: pd.DataFrame) -> dict[tuple[str, int], int]:
    """Peak memory beyond weight and hidden by (sampler, B), where it was measured."""
    if "peak_extra_bytes" not in rows:
        return {}
    known = rows[rows.peak_extra_bytes.notna()]
    return {
        (row.provider, int(row.b)): int(row.peak_extra_bytes)
        for row in known[["provider", "b", "peak_extra_bytes"]].itertuples()
    }


def _against(configuration: Configuration, name: str, reference: str) -> pd.DataFrame:
    """Configuration.ratio; of the reference to itself 1, with the interval of its median."""
    if name != reference:
        return configuration.ratio(name, reference)
    rows = configuration.measured
    own = rows[rows.provider == reference].set_index("b")
    return pd.DataFrame(
        {"value": 1.0, "lo": own.ci_lo_us / own.median_us, "hi": own.ci_hi_us / own.median_us},
        index=own.index,
    )
