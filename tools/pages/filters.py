"""Truncated sampling: docs/truncated.md."""

from __future__ import annotations

import pandas as pd

from fsbench.discover import discover
from pages.blocks import (
    H200,
    RESULTS,
    block,
    bullets,
    listed,
    medians,
    places,
    results,
    span,
    table,
    with_source,
)

OURS, JOINT = "flash_sampling_topk_topp", "flashinfer_joint"
CUT, LAUNCHES = "truncated-20261123", "truncated-launches/launches.csv"
GRID = "truncated-grid-20261122"
TENSORS = "h100/truncated-tensors/tests.csv"
SEARCHED = "h100/truncated-tensors/searches.csv"
LAWS = ("normal-0.01", "normal-3", "zipf-1.1", "peaked-12")
FILTERS = {
    "k = 50, p = 0.9": (50, 0.9, 0.0),
    "k = 200, p = 0.9": (200, 0.9, 0.0),
    "k = 1000, p = 0.9": (1000, 0.9, 0.0),
    "min_p = 0.05": (0, 1.0, 0.05),
    "p = 0.9": (0, 0.9, 0.0),
    "p = 0.5": (0, 0.5, 0.0),
    "none": (0, 1.0, 0.0),
}


@block
def filter_orders() -> str:
    """The order of filters and the rule of ties of every sampler with filters."""
    ties = {"first": "the lower token", "kept": "all", "any": "any"}
    rows = []
    for entry in discover().values():
        if entry.provider is None or not entry.provider.capabilities.filters:
            continue
        able = entry.provider.capabilities
        order = [stage for stage in able.filter_order if stage in ("temperature", *able.filters)]
        stages = ", ".join(stage.replace("_", "-") for stage in order)
        rows.append([f"`{entry.name}`", stages, ties[able.ties]])
    return table(["sampler", "order", "of equal logits it keeps"], rows, left=3)


@block
def filtered_times(run: str = CUT) -> str:
    us = medians(run).unstack("b").droplevel("d")
    rows = [
        [f"`{name}`", *("" if pd.isna(time) else f"{time:.0f}" for time in row)]
        for name, row in us.iterrows()
    ]
    return with_source(table(["sampler", "B = 1", *us.columns[1:]], rows), *places(run))


def _launches() -> pd.DataFrame:
    found = pd.read_csv(H200 / LAUNCHES)
    found = found[found.logits == "normal:1"]
    return found.set_index(["sampler", "top_k", "top_p", "min_p", "b"]).sort_index()


@block
def over_no_filters() -> str:
    found = _launches()
    plain, cut = found.loc[("plain", 0, 1.0, 0.0)], found.loc[("truncated", 50, 0.9, 0.0)]
    rows = [
        [
            B,
            *(f"{each.span_us[B]:.0f}" for each in (plain, cut)),
            f"{cut.span_us[B] / plain.span_us[B]:.2f}",
            f"{cut.look_us[B]:.0f}",
            f"{cut.fused_us[B] - plain.span_us[B]:.0f}",
        ]
        for B in plain.index
    ]
    heads = [
        *("B", "`flash_sample`, us", "k = 50, p = 0.9", "times as long", "of it the look"),
        "storing the logits",
    ]
    return with_source(table(heads, rows, left=0), *places(LAUNCHES))


@block
def by_filters() -> str:
    found = _launches().span_us
    sampled = {"`flash_sample`, none": found["plain", 0, 1.0, 0.0]}
    sampled |= {words: found[("truncated", *each)] for words, each in FILTERS.items()}
    rows = [[words, *(f"{time:.0f}" for time in us)] for words, us in sampled.items()]
    return with_source(table(["filters", "B = 1", "16", "64", "256"], rows), *places(LAUNCHES))


@block
def of_rows() -> str:
    """Filters as numbers and as tensors; and as tensors before rows of tensors were tested."""
    keys = ["sampler", "given", "top_k", "top_p", "min_p", "b"]
    now, before = (
        pd.read_csv(RESULTS / name, keep_default_na=False).set_index(keys).span_us
        for name in (TENSORS, SEARCHED)
    )
    rows = []
    for (sampler, given, top_k, top_p, min_p), us in now.groupby(level=keys[:-1], sort=False):
        if top_p == 0.5:  # in tensors it was tested then, and is searched since
            continue
        words = [f"k = {top_k.replace('and', 'or')}"] if top_k != "0" else []
        words += [f"p = {top_p}"] if top_p < 1 else []
        words += [f"min_p = {min_p}"] if min_p > 0 else []
        name = {"plain": "`flash_sample`, none", "matmul": "the matmul alone"}.get(sampler)
        old = before.sort_index().loc[sampler, given, top_k, top_p, min_p]
        rows.append(
            [name or ", ".join(words), given]
            + [f"{time:.0f}" for time in us]
            + [f"{time:.0f}" if given == "tensors" else "" for time in old]
        )
    heads = ["filters", "given as", *(f"B = {B}" for B in us.index.get_level_values("b"))]
    heads += [f"searched, {B}" for B in us.index.get_level_values("b")]
    return with_source(table(heads, rows, left=2), *places(TENSORS, SEARCHED))


@block
def filter_findings() -> str:
    us = medians(CUT).unstack("provider")
    ours = us[OURS]
    rivals = us[["flashinfer_top_k_top_p", "flashinfer_top_k_top_p_lean"]].min(axis=1) / ours
    laws = [f"truncated-law-{law}-20261123" for law in LAWS]
    found = results(*laws).set_index(["provider", "b"]).median_us
    alone = [
        f"{span(found[name, 1], '.0f')} us at B = 1 and {span(found[name, 256], '.0f')} at B = 256"
        for name in (OURS, JOINT)
    ]
    grid = results(GRID).pivot_table(
        index=["top_k", "top_p", "min_p", "mixed", "b"], columns="provider", values="median_us"
    )
    joint = grid[["flashinfer_top_k_top_p_lean", JOINT]].min(axis=1) / grid[OURS]
    joint, akunu = joint.dropna(), (grid.akunu_exact / grid[OURS]).dropna()
    lines = (
        f"With k = 50 and p = 0.9 the fused path is {span(rivals, '.1f')} times as fast as "
        f"FlashInfer with top-k first, and takes {span(ours / us.matmul_only)} of the time of the "
        "matmul alone.",
        f"`akunu_exact` takes {span(us.akunu_exact / ours)} of the fused path's time: it is a "
        "matmul of cuBLAS and a pass over bf16 logits, where the fused path stores fp32.",
        f"With p = 0.9 alone the law of the logits matters little. Over {listed(LAWS)} the fused "
        f"path takes {alone[0]}, FlashInfer's joint kernel {alone[1]}.",
        f"Over the whole grid of `--preset truncated` FlashInfer's faster kernel takes "
        f"{span(joint)} times as long as the fused path; it is faster in {sum(joint < 1)} of "
        f"{len(joint)} cells. `akunu_exact` takes {span(akunu)} times as long, and is faster in "
        f"{sum(akunu < 1)} of {len(akunu)}.",
    )
    return with_source(bullets(*lines), *places(CUT, *laws, GRID))


@block
def akunu_variation() -> str:
    frame = pd.read_csv(RESULTS / "truncated" / "akunu_variation.csv")
    rows = []
    for row in frame.itertuples():
        set_ = [row.top_k or "-", row.top_p if row.top_p < 1 else "-", row.min_p or "-"]
        changed = "" if pd.isna(row.changed_pct) else f"{row.changed_pct:.2f} %"
        kept = (f"{row.kept:,.0f}", f"{row.kept_exact:,.0f}")
        rows.append([row.logits, *set_, *kept, f"{row.tv:.4f}", changed])
    heads = ["logits", "top-k", "top-p", "min-p", "kept", "should be", "variation", "changed"]
    return table(heads, rows)
