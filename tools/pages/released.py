"""Times and costs of what is released, for the requests that people send: docs/audit.md."""

from __future__ import annotations

import pandas as pd

from pages.blocks import (
    H200,
    LARGE,
    MATMUL,
    PORTABLE,
    SMALL,
    block,
    bullets,
    listed,
    places,
    results,
    span,
    table,
    with_source,
)

RUN = "rivals-20261123"
REQUESTS = {"plain": "plain", "default": "default", "top_p": "top-p"}
BATCHES = (1, 16, 64, 256)
HEADS = SMALL[0], LARGE[0]
FILTERED = "flash_sampling_topk_topp"


def _runs(D: int) -> list[str]:
    runs = [f"{RUN}/{request}_d{D}" for request in REQUESTS]
    return [each for each in runs if (H200 / each).exists()]


def _cells(D: int, column: str, function: str = "median") -> pd.DataFrame:
    """A column of the results by provider, for each request and B; ours is one provider."""
    found = results(*_runs(D))
    request = found.run.str.extract(r"/(\w+)_d\d+$", expand=False)
    twice = (found.provider == FILTERED) & (request == "plain")  # flash_sampling is there, too
    found = found.assign(provider=found.provider.replace(FILTERED, PORTABLE), request=request)
    columns = ["request", "b"]
    return found[~twice].pivot_table(column, "provider", columns, aggfunc=function)


def of_request(request: str) -> pd.DataFrame:
    """Columns fused, matmul and rival (the fastest of the others), us; a row for each D and B."""
    found = {}
    for D in HEADS:
        us = _cells(D, "median_us")
        if request in us:
            us = us[request].dropna()
            rival = us.drop([MATMUL, PORTABLE]).min()
            found[D] = pd.DataFrame(
                {"fused": us.loc[PORTABLE], "matmul": us.loc[MATMUL], "rival": rival}
            )
    return pd.concat(found)


def _shown(value: float, form: str) -> str:
    return "-" if pd.isna(value) else f"{value:{form}}"


@block
def released_times(D: str = str(SMALL[0])) -> str:
    us = _cells(int(D), "median_us")
    columns = [(request, B) for request in REQUESTS for B in BATCHES if (request, B) in us]
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
    D, B = SMALL[0], 64
    host, extra = _cells(D, "host_us"), _cells(D, "peak_extra_bytes") / 1e6
    first = _cells(D, "ahead_s", "max").max(axis=1)
    rows = [
        [
            f"`{name}`",
            *(
                _shown(of.loc[name].get((each, B)), ",.0f")
                for of in (host, extra)
                for each in REQUESTS
            ),
            f"{first[name]:.1f}",
        ]
        for name in host[("default", B)].sort_values().index
    ]
    said = [f"{what}: {REQUESTS[each]}" for what in ("host, us", "extra MB") for each in REQUESTS]
    return with_source(
        table([f"B = {B}", *said, "longest first call, s"], rows), *places(*_runs(D))
    )


@block
def released_findings() -> str:
    """What the tables say."""
    default, top_p, plain = (of_request(each) for each in ("default", "top_p", "plain"))
    over = plain.fused / plain.matmul
    few = over.index.get_level_values("b") <= 64
    measured = listed(f"{D:,}" for D in top_p.index.unique(0))
    lines = (
        f"The default request: ours takes {span(default.fused / default.matmul)} of the matmul "
        f"alone, the fastest of the others {span(default.rival / default.fused)} times as long as "
        "ours.",
        f"Top-p alone (D = {measured}): {span(top_p.fused / top_p.matmul)} of the matmul, and the "
        f"fastest of the others {span(top_p.rival / top_p.fused)} times as long.",
        f"Plain: {span(over[few])} of the matmul up to B = 64, {span(over[~few])} at 256; the "
        f"fastest of the others {span(plain.rival / plain.fused)} times as long.",
    )
    return with_source(bullets(*lines), *places(*(run for D in HEADS for run in _runs(D))))
