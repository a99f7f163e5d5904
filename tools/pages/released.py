"""Times and costs of what is released, for the requests that people send: docs/audit.md."""

from __future__ import annotations

import pandas as pd

from pages.blocks import (
    H200,
    MATMUL,
    PORTABLE,
    SMALL,
    block,
    not_yet,
    places,
    results,
    table,
    with_source,
)

RUN = "rivals-20261123"
REQUESTS = {"plain": "plain", "default": "default", "top_p": "top-p"}
BATCHES = (1, 16, 64, 256)
FILTERED = "flash_sampling_topk_topp"


def _runs(D: int) -> list[str]:
    return [f"{RUN}/{request}_d{D}" for request in REQUESTS]


def _cells(D: int, column: str) -> pd.DataFrame:
    """A column of the results by provider, for each request and B; ours is one provider."""
    found = results(*_runs(D))
    found = found.assign(
        provider=found.provider.replace(FILTERED, PORTABLE),
        request=found.run.str.extract(r"/(\w+)_d\d+$", expand=False),
    )
    return found.pivot_table(index="provider", columns=["request", "b"], values=column)


def _shown(value: float, form: str) -> str:
    return "-" if pd.isna(value) else f"{value:{form}}"


@block
def released_times(D: str = str(SMALL[0])) -> str:
    if not (H200 / RUN).exists():
        return not_yet("rivals")
    us = _cells(int(D), "median_us")
    columns = [(request, B) for request in REQUESTS for B in BATCHES]
    order = us[("default", 64)].sort_values().index
    first = [name for name in (MATMUL, PORTABLE) if name in order]
    rows = [
        [f"`{name}`", *(_shown(us[column][name], ",.0f") for column in columns)]
        for name in (*first, *(name for name in order if name not in first))
    ]
    heads = ["us", *(f"{REQUESTS[request]}, B = {B}" for request, B in columns)]
    return with_source(table(heads, rows), *places(*_runs(int(D))))


@block
def released_costs() -> str:
    if not (H200 / RUN).exists():
        return not_yet("rivals")
    D, B = SMALL[0], 64
    kinds = {"host_us": ",.0f", "first_call_s": ".1f", "peak_extra_bytes": ",.0f"}
    found = {kind: _cells(D, kind) for kind in kinds}
    names = found["host_us"][("default", B)].sort_values().index
    found["peak_extra_bytes"] = found["peak_extra_bytes"] / 1e6
    rows = [
        [
            f"`{name}`",
            *(
                _shown(cells[(request, B)].get(name, float("nan")), kinds[kind])
                for kind, cells in found.items()
                for request in REQUESTS
            ),
        ]
        for name in names
    ]
    said = {"host_us": "host, us", "first_call_s": "first call, s", "peak_extra_bytes": "extra MB"}
    heads = ["B = 64", *(f"{said[kind]}: {name}" for kind in found for name in REQUESTS.values())]
    return with_source(table(heads, rows), *places(*_runs(D)))
