"""SIMPLE on CPUs: docs/simple.md, from records of a command that fsbench 0.1 had."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd

from fsbench.cli.hotvocab import of_run
from fsbench.simple.hot import Coverage
from fsbench.simple.pipeline import Pipeline, Sampling, steady_state
from fsbench.simple.sizing import Cost, best
from pages.blocks import (
    FI2_LEAN,
    H200,
    HOPPER,
    MATMUL,
    ONE_PASS,
    RESULTS,
    SMALL,
    block,
    bullets,
    environments,
    medians,
    said,
    table,
    with_source,
)

PLAIN, HOST = "cpu/simple-20261121", "h200/simple-20261121"
"""A machine without a GPU, and the host of one: folders below results/."""
LEAN = "lean-20261123"

ADDING = {
    HOPPER: "fused (Hopper)",
    ONE_PASS: "one-pass argmax",
    FI2_LEAN: "FI2, lean",
    "exponential_race": "exponential race",
}
"""Samplers on the GPU whose time beyond the matmul stands beside the CPUs'."""


def _read(record: str, name: str) -> pd.DataFrame:
    return pd.read_csv(RESULTS / record / f"{name}.csv")


@block
def cpu_steps() -> str:
    """Rows per second of one sampler in the four designs."""
    of = _read(PLAIN, "steps").set_index("design")
    plain, all_controls = (of[of.controls == name] for name in ("plain", "production"))
    rows = [
        [f"{number}. {design}"]
        + [
            text
            for each in (plain, all_controls)
            for text in (f"{each.rows_per_s[design]:,.0f}", f"{each.times_first[design]:,.1f}")
        ]
        for number, design in enumerate(plain.index, start=1)
    ]
    heads = ["design", "plain, rows/s", "x the port", "all controls, rows/s", "x the port"]
    return with_source(table(heads, rows), PLAIN)


@block
def cpu_scaling(record: str) -> str:
    """Rows per second by samplers."""
    of = _read(record, "scaling").set_index(["samplers", "design"])
    rows = [
        [m]
        + [
            text
            for name in ("offloaded", "SHVS")
            for text in (f"{of.rows_per_s[m, name]:,.0f}", f"{of.efficiency[m, name]:.2f}")
        ]
        for m in of.index.unique(0)
    ]
    heads = ["samplers", "offloaded, rows/s", "efficiency", "SHVS, rows/s", "efficiency"]
    return with_source(table(heads, rows), record)


@block
def cpu_penalties() -> str:
    """Time of a row by how much its request has seen."""
    rows = [
        [f"{row.seen:,}", f"{row.row_us:.1f}", f"{row.ratio:.2f}"]
        for row in _read(PLAIN, "penalties").itertuples()
    ]
    return with_source(table(["different tokens seen", "us per row", "x none"], rows), PLAIN)


@block
def cpu_ring() -> str:
    """Cost of a step through the ring."""
    rows = [
        [row.b, f"{row.ring_us:.0f}", f"{row.overhead_us:.0f}"]
        for row in _read(PLAIN, "ring").itertuples()
    ]
    return with_source(table(["B", "us per step", "of it the ring"], rows), PLAIN)


@block
def cpu_sizes() -> str:
    """The best number of hot tokens, by the model and as measured."""
    facts = json.loads((RESULTS / PLAIN / "fit.json").read_text())
    cover = Coverage(facts["v"], *(np.array(facts[name]) for name in ("sizes", "mean", "low")))
    rows = []
    for both, name in ((False, "F, equation 10"), (True, "F2, the hot set always scanned")):
        found = best(cover, Cost(**facts["cost"]), both)
        root = "-" if found.root is None else f"{found.root:,.0f}"
        covered = f"{float(cover.at(found.H)):.3f}"
        rows.append([name, root, f"{found.H:,}", covered, f"{1e6 / found.cost_us:,.0f}"])
    scans = _read(PLAIN, "scans")
    at = scans.loc[scans.row_us.idxmin()]
    rows.append(["measured", "", f"{at.h:,.0f}", f"{at.hits:.3f}", f"{1e6 / at.row_us:,.0f}"])
    heads = ["", "H* by equation 12", "H* by enumeration", "covered", "rows/s"]
    cost = facts["cost"]
    fit = f"Fitted: c = {1e3 * cost['c_us']:.3f} ns per token, c0 = {cost['c0_us']:.2f} us."
    return with_source(f"{table(heads, rows)}\n\n{fit}", PLAIN)


@block
def cpu_findings() -> str:
    of = _read(PLAIN, "steps").set_index(["controls", "design"])
    whole, hot = of.loc[("plain", "offloaded")], of.loc[("plain", "SHVS")]
    filtered = of.loc[("production", "SHVS")]
    seen = _read(PLAIN, "penalties").set_index("seen").ratio
    busy = environments(RESULTS / PLAIN)[0]["others_cores"]
    return bullets(
        f"A row takes {whole.row_us:.0f} us whole and {hot.row_us:.1f} us by its hot tokens "
        f"({hot.times_offloaded:.1f} times as many rows): they settle {100 * hot.settled:.0f} % of "
        "the rows.",
        f"With all controls SHVS gains less ({filtered.times_offloaded:.2f} times the full pass). "
        "All that the filters keep must be hot, which holds for "
        f"{100 * filtered.settled:.0f} % of the rows, and the full pass needs no exponentials of "
        "tokens that top-k or min-p cut.",
        f"Penalties at 4,096 different tokens seen make a row {seen[4096]:.2f} times as long.",
        f"Other processes kept {busy:.2f} cores busy meanwhile.",
    )


@block
def cpu_verdicts() -> str:
    """The tier `ci` of the four designs."""
    lines = (RESULTS / PLAIN / "verify.jsonl").read_text(encoding="utf-8").splitlines()
    checks = pd.DataFrame(check for check in map(json.loads, lines) if "verdict" in check)
    rows = [
        [f"`{name}`", f"{(of.verdict == 'ok').sum()} of {len(of)}"]
        for name, of in checks.groupby("provider")
    ]
    return with_source(table(["sampler", "checks of tier `ci` that are ok"], rows), PLAIN)


@block
def cpu_variation() -> str:
    """The bound on the distance between SHVS and the float64 baseline."""
    found = _read(PLAIN, "variation").groupby("controls").last()
    rows = [
        [name, *(f"{100 * row[key]:.3f} %" for key in ("mean_distance", "mean_distance_below"))]
        for name, row in found.iterrows()
    ]
    return with_source(table(["controls", "at most, measured", "below, at 95 %"], rows), PLAIN)


@block
def cpu_pipelines() -> str:
    """Four stages of 2 ms, B = 64: the samplers of H200 results, and these on CPUs."""
    samplings = of_run(H200 / LEAN, 64, *SMALL)
    hot = json.loads((RESULTS / PLAIN / "fit.json").read_text())["hot"]
    for design, measured in _read(PLAIN, "scaling").groupby("design"):
        fastest = measured.loc[measured.rows_per_s.idxmax()]
        bus_us = 64 * hot[design] * 2 / 50e3  # bf16 logits at 50 GB/s
        name = f"{design}, {fastest.samplers:.0f} CPU samplers"
        samplings.append(Sampling(name, 0.0, (bus_us, 64e6 / fastest.rows_per_s)))
    rows = []
    for each in sorted(samplings, key=lambda one: one.on_stage_us + sum(one.beside_us)):
        added = each.beside_us or (each.on_stage_us,)
        cells = [each.name, " + ".join(f"{us:.0f}" for us in added)]
        for m in (4, 5, 6):
            found = steady_state(Pipeline((2000.0,) * 4, m, 64), each)
            cells.append(f"{found.tokens_per_s:,.0f} ({100 * found.bubble:.1f} %)")
        rows.append(cells)
    heads = ["sampler", "adds, us", *(f"{m} in flight" for m in (4, 5, 6))]
    return with_source(table(heads, rows), f"h200/{LEAN}", PLAIN)


@block
def cpu_exposed() -> str:
    """Time per step that a GPU waits for the CPUs, beside what samplers on the GPU add to it."""
    waits = _read(HOST, "overlap").set_index(["design", "b"])
    adds = medians(LEAN).unstack("provider").loc[SMALL[0]]
    adds = adds.sub(adds[MATMUL], axis=0)
    ways = {"serial": "exposed_serial_us", "overlapped": "exposed_overlapped_us"}
    designs = [(name, way) for name in ("offloaded", "SHVS") for way in ways]
    rows = [
        [B]
        + [f"{waits[ways[way]][name, B]:,.0f}" for name, way in designs]
        + [f"{adds[name][B]:.0f}" for name in ADDING]
        for B in adds.index
    ]
    heads = ["B", *(f"{name}, {way}" for name, way in designs), *ADDING.values()]
    exposed = {way: waits[column].unstack("design") for way, column in ways.items()}
    serial, overlapped = (exposed[way].loc[adds.index].min(axis=1) for way in ways)
    gumbel, one_pass = adds[FI2_LEAN], adds[ONE_PASS]
    told = bullets(
        said(
            "With one batch (serial) every sampler on the GPU is faster, at every B.",
            (serial > adds[list(ADDING)].max(axis=1)).all(),
        ),
        said(
            "With two batches that take turns the offloaded design exposes less than FlashInfer's "
            "Gumbel-max adds at every B, and more than a one-pass argmax or the fused kernel.",
            ((overlapped < gumbel) & (overlapped > one_pass)).all(),
        ),
    )
    return with_source(f"{table(heads, rows, left=0)}\n\n{told}", HOST, f"h200/{LEAN}")
