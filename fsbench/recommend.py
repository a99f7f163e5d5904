"""Which exact sampler is fastest at each B, and what it saves, from measured results.

Times of different runs are never compared: every sampler is set against one that shares its run,
the one that most runs have (fsbench.tables.Configuration.ratio). Needs no torch and no sampler.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import pandas as pd

from fsbench import logits_store
from fsbench.provider import Kind
from fsbench.tables import Configuration


@dataclass(frozen=True)
class Advice:
    """The fastest sampler at one B.

    ties: others that may be as fast: their intervals overlap.
    instead_of: the fastest of the other way, over stored logits if `best` is fused and the reverse;
        None if only one way was measured. saved_us: its time less that of `best`.
    """

    b: int
    best: str
    us: float
    ties: tuple[str, ...]
    instead_of: str | None
    saved_us: float | None


def recommend(configuration: Configuration, candidates: Collection[str]) -> list[Advice]:
    """Advice for every B at which a candidate was measured; exact samplers only.

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
    found = []
    for B in sorted(us.index):
        here = {name: table.loc[B] for name, table in ratios.items() if B in table.index}
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
            )
        )
    return found


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
