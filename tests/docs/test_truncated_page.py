"""docs/truncated.md says what the samplers state and what was measured."""

from __future__ import annotations

import re
from itertools import pairwise

import pandas as pd
from docs_pages import first_cells, section, text
from tree import H200, ROOT


def test_orders_of_filters_and_ties_are_those_that_the_samplers_state() -> None:
    from fsbench.discover import discover

    providers = [entry.provider for entry in discover().values() if entry.provider]
    able = {each.name: each.capabilities for each in providers if each.capabilities.filters}
    table = section("truncated.md", "The law").split("| sampler |", 1)[1]
    assert set(first_cells(table)) == set(able)
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            continue
        cells = line.split("|")
        for name in re.findall(r"`(\w+)`", cells[1]):
            stages = ("temperature", *able[name].filters)
            order = [stage for stage in able[name].filter_order if stage in stages]
            told = re.findall(r"temperature|min-p|top-k|top-p", cells[2])
            assert told == [stage.replace("_", "-") for stage in order], name
            rule = {"first": "the lower token", "kept": "all", "any": "any"}[able[name].ties]
            assert cells[3].strip().endswith(rule), name


def test_what_akunus_approximations_cost_is_the_recorded_table() -> None:
    table = pd.read_csv(ROOT / "results" / "truncated" / "akunu_variation.csv")
    page = text("truncated.md")
    for row in table.itertuples():
        filters = [row.top_k or "-", row.top_p if row.top_p < 1 else "-", row.min_p or "-"]
        changed = "" if pd.isna(row.changed_pct) else f"{row.changed_pct:.2f} %"
        cells = [row.logits, *filters, f"{row.kept:,.0f}", f"{row.kept_exact:,.0f}"]
        line = " | ".join(map(str, [*cells, f"{row.tv:.4f}", changed]))
        assert f"| {line} |" in page


def test_times_of_truncated_sampling_are_the_recorded_ones() -> None:
    page = section("truncated.md", "Times")
    h200 = H200
    us = pd.read_csv(h200 / "truncated-20261122" / "results.csv").pivot_table(
        index="provider", columns="b", values="median_us"
    )
    launches = pd.read_csv(h200 / "truncated-launches" / "launches.csv").set_index(
        ["logits", "sampler", "top_k", "top_p", "min_p", "b"]
    )

    def spans(law: str, top_k: int, top_p: float, min_p: float = 0.0) -> pd.Series[float]:
        return launches.span_us.loc[law, "truncated", top_k, top_p, min_p]

    plain = launches.span_us.loc["normal:1", "plain", 0, 1.0, 0.0]
    cut, look = spans("normal:1", 50, 0.9), launches.look_us.loc["normal:1", "truncated", 50, 0.9]
    expected = [
        f"| `{name}` | {' | '.join('' if t != t else f'{t:.0f}' for t in row)} |"
        for name, row in us.iterrows()
    ]
    expected += [
        f"| {B} | {plain[B]:.0f} | {cut[B]:.0f} | {cut[B] / plain[B]:.2f} | {look[0.0, B]:.0f} |"
        for B in plain.index
    ]
    expected += [f"| `flash_sample`, none | {' | '.join(f'{t:.0f}' for t in plain)} |"]
    for words, filters in {
        "k = 50, p = 0.9": (50, 0.9),
        "k = 200, p = 0.9": (200, 0.9),
        "k = 1000, p = 0.9": (1000, 0.9),
        "min_p = 0.05": (0, 1.0, 0.05),
        "p = 0.9": (0, 0.9),
        "p = 0.5": (0, 0.5),
        "none": (0, 1.0),
    }.items():
        times = spans("normal:1", *filters)
        expected += [f"| {words} | {' | '.join(f'{t:.0f}' for t in times)} |"]
    lines = page.splitlines()
    told = [
        line
        for line, after in pairwise(lines)
        if line.startswith("| ") and not after.startswith("|--")  # no header
    ]
    assert sorted(told) == sorted(expected)

    fused = launches.fused_us.loc["normal:1", "truncated", 50, 0.9, 0.0]
    assert f"the look takes {look[0.0, 64]:.0f} us, and {fused[64] - plain[64]:.0f} go" in page
    hundreds = spans("normal:1", 200, 0.9)
    assert f"{hundreds[64]:.0f} and {hundreds[256]:.0f} at the later commit" in page
    ours = us.loc["flash_sampling_topk_topp"]
    ratio = us.loc[["flashinfer_top_k_top_p", "flashinfer_top_k_top_p_lean"]].min() / ours
    assert f"{ratio.min():.1f} to {ratio.max():.1f} times as fast as FlashInfer" in page
    slower = (cut / plain).round(2)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert (
        f"{ratio.min():.1f} to {ratio.max():.1f} times as fast as FlashInfer at k = 50, p = 0.9, "
        f"and {slower.min():.2f} to {slower.max():.2f} times as long as without filters" in readme
    )
    assert (us.loc["akunu_exact"] < ratio * ours).all()
    assert (ours / us.loc["matmul_only"]).loc[[1, 16]].max() < 1
    assert f"{1 - us.at['akunu_exact', 256] / ours[256]:.0%}" == "3%"
    alone = launches.loc["normal:1", "truncated", 0, 0.9, 0.0, 256]
    assert f"{alone.sections_us:.0f} us of {alone.span_us:.0f}" in page
    laws = ("normal-0.01", "normal-3", "zipf-1.1", "peaked-12")
    found = pd.concat(
        pd.read_csv(h200 / f"truncated-20261122-{law}" / "results.csv") for law in laws
    ).set_index(["provider", "b"])
    for name in ("flash_sampling_topk_topp", "flashinfer_joint"):
        one, many = (found.median_us[name, B].round().astype(int) for B in (1, 256))
        assert f"{one.min()} to {one.max()}" in page
        assert f"and {many.min()} to {many.max()}" in page


def test_the_grid_of_filters_shows_what_is_said_of_it() -> None:
    page = section("truncated.md", "Times")
    grid = pd.read_csv(H200 / "truncated-grid-20261122" / "results.csv")
    us = grid[grid.status == "ok"].pivot_table(
        index=["top_k", "top_p", "min_p", "mixed", "b"], columns="provider", values="median_us"
    )
    ours = us.flash_sampling_topk_topp
    rivals = us[["flashinfer_top_k_top_p_lean", "flashinfer_joint"]].min(axis=1) / ours
    assert list(rivals[rivals < 1].index) == [(0, 0.5, 0.0, False, 256)]
    assert f"{1 - rivals.min():.0%}" == "8%"
    akunu = (us.akunu_exact / ours).unstack("b")
    few = akunu[akunu.index.get_level_values("top_k").isin((1, 20, 50))].drop(True, level="mixed")
    assert few[[1, 64]].min().min() > 1
    assert (few[256].min().round(2), few[256].max().round(2)) == (0.96, 0.98)
    hundreds = akunu.loc[200, [64, 256]]
    assert (hundreds.min().min().round(2), hundreds.max().max().round(2)) == (0.78, 0.91)
    assert akunu.loc[1000].round(2).min().min() == 1
    then = ours.loc[200, 0.9, 0.0, False]
    assert f"took {then[64]:.0f} and {then[256]:.0f} us then" in page
    assert (us.akunu_exact / us.matmul_only).max().round() == 11
    assert "up to 11 times as long as the matmul" in page


def test_what_storing_logits_costs_is_the_recorded() -> None:
    page = section("truncated.md", "Times")
    table = pd.read_csv(H200 / "truncated-storing.csv")
    hopper = table[table.kernel == "hopper"].set_index(["written", "stores"])
    added = hopper.fused_us - hopper.flash_sample_us
    everything = added["all blocks"]
    gained = everything["by threads"] - everything["by TMA"]
    assert f"stores by TMA gain {gained:.0f} us" in page
    exchanged = hopper.xs("by threads", level="stores").filter(like="exchanged", axis=0)
    all_of, some, rounds = exchanged.fused_us
    assert f"{exchanged.share_of_blocks.iloc[1]:.0%} of".replace("%", " %") in page
    assert some >= all_of
    assert f"takes {all_of - rounds:.0f} us less" in page
