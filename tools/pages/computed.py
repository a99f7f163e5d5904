"""Functions of records that tables.toml names: views that no expression can compute."""

from __future__ import annotations

import json
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from fsbench.cli.hotvocab import of_run
from fsbench.e2e import records as e2e_records
from fsbench.e2e.measure import NOISY
from fsbench.e2e.summary import summary
from fsbench.problem import models as named_models
from fsbench.records.summary import read_csv
from fsbench.report import against_paper as beside_paper
from fsbench.report import compare as runs
from fsbench.report import logits_store
from fsbench.report.attribution import attribute, extend
from fsbench.report.tables import Configuration, configurations
from fsbench.simple.hot import Coverage
from fsbench.simple.pipeline import Sampling, steady_state
from fsbench.simple.sizing import Cost, best
from pages.blocks import AUTHORS, HOPPER, MATMUL, PORTABLE, RESULTS, SMALL


def models() -> pd.DataFrame:
    """Return name, d and v of the models of `fsbench list`."""
    return pd.DataFrame([{"model": m.name, "d": m.D, "v": m.V} for m in named_models().values()])


def measured(*names: str) -> list[Configuration]:
    """Return the configurations of runs."""
    return configurations(
        pd.concat([read_csv(RESULTS / name) for name in names], ignore_index=True)
    )


def attribution(*names: str) -> pd.DataFrame:
    """Return the parts of the Hopper kernel's speedups over three samplers, D = 4096."""
    (of_d4096,) = [each for each in measured(*names) if "d4096" in each.stem]
    over = ("flashinfer_gumbel", "flashinfer_gumbel_lean", "gumbel_argmax")
    parts = [attribute(of_d4096, HOPPER, name, MATMUL).assign(provider=name) for name in over]
    return pd.concat(parts).rename_axis("b").reset_index()


def two_terms(*names: str) -> pd.DataFrame:
    """Return the fit of the I/O model with two more terms, by sampler and head."""
    rows = []
    for each in measured(*names):
        for name in each.providers(each.drawn, fused=False):
            if model := extend(each, name, MATMUL, "weight_stream"):
                row: dict[str, Any] = {"provider": name, "d": each.rows.d.iloc[0]}
                row |= {key: getattr(model, key) for key in ("kernels", "fixed_us", "gaps_us")}
                row |= {"passes": model.passes, "worst_pct": 100 * model.worst}
                rows.append(row | {"tried": ", ".join(map(str, model.held_out))})
    return pd.DataFrame(rows)


def logits_store_overhead(name: str) -> pd.DataFrame:
    """Return the cost of storing the logits, by head and B (Table 9 of the paper)."""
    return pd.concat(
        logits_store.overhead(each).rename_axis("b").reset_index().assign(d=each.rows.d.iloc[0])
        for each in measured(name)
    )


def beside_the_paper(name: str) -> pd.DataFrame:
    """Return speedups over the paper's baselines (Tables 4 and 5): published, ours and theirs.

    Theirs is the authors' kernel in the same run; NaN if it was not measured.
    """
    parts = []
    for each in measured(name):
        gpu = each.rows.gpu.iloc[0]
        one = beside_paper.cells(each, gpu, PORTABLE)
        others = {
            "hopper": beside_paper.cells(each, gpu, HOPPER),
            "theirs": beside_paper.cells(each, gpu, AUTHORS),
        }
        for column, cells in others.items():
            named = cells.rename(columns={"ours": column})[["b", "method", column]]
            one = one.merge(named, on=["b", "method"], how="left")
        parts.append(one)
    cells = pd.concat(parts, ignore_index=True)
    verdicts = [str(beside_paper.agreement(ratio, beside_paper.WITHIN)) for ratio in cells.ratio]
    return cells.assign(verdict=verdicts)


def over_ranks_beside_the_paper(name: str) -> pd.DataFrame:
    """Return speedups over the paper's baselines on several GPUs (Table 6), published and ours."""
    parts = []
    for each in measured(name):
        one = beside_paper.cells_over_ranks(each, PORTABLE)
        hopper = beside_paper.cells_over_ranks(each, HOPPER).set_index(["b", "method"])["ours"]
        one = one.join(hopper.rename("hopper"), on=["b", "method"])
        parts.append(one.assign(tp=each.rows.tp.iloc[0]))
    return pd.concat(parts, ignore_index=True)


def saved_of_each_baseline(*names: str) -> pd.DataFrame:
    """Return the summaries of engines' records over each of vLLM's samplers, named in `over`.

    e2e.csv has it over one of them. Savings are of runs with the same number, as there.
    """
    parts = []
    for name, over in product(names, ("vllm", "vllm-flashinfer")):
        lines = e2e_records.read(RESULTS / name)
        cases = [{**line["case"], "baseline": line["case"]["sampler"] == over} for line in lines]
        rebased = [{**line, "case": case} for line, case in zip(lines, cases, strict=True)]
        parts.append(summary(rebased).assign(over=over))
    return pd.concat(parts, ignore_index=True)


def saved_of_stricter_baseline(*names: str) -> pd.DataFrame:
    """Return the least that each record saves over any of vLLM's samplers.

    Cells whose largest standard deviation exceeds NOISY points are left out.
    """
    saving = ["reduction_pct", "gpu_reduction_pct", "amdahl_pct"]
    least = {**dict.fromkeys(saving, "min"), "reduction_sd_pct": "max"}
    cell = ["gpu", "model", "sampler", "requests", "b"]
    each = (
        saved_of_each_baseline(name).groupby(cell, sort=False, as_index=False).agg(least)
        for name in names
    )
    saved = pd.concat(each, ignore_index=True)
    return saved[saved.reduction_sd_pct <= NOISY]


def served_tokens(*names: str) -> pd.DataFrame:
    """Return the counters of tokens that the plug-in drew, one row for each of its samplers."""
    lines = (line for name in names for line in e2e_records.read(RESULTS / name))
    return pd.DataFrame([line["counts"] for line in lines if "counts" in line])


def longest_steps(*names: str) -> pd.DataFrame:
    """Return the longest step of each decoding, in ms, repeated runs included."""
    lines = [line for name in names for line in e2e_records.read(RESULTS / name)]
    longest = (
        {**line["case"], "longest_ms": max(line["decoded"]["step_us"]) / 1e3}
        for line in lines
        if "decoded" in line
    )
    return pd.DataFrame(longest)


def two_runs(one: str, other: str) -> pd.DataFrame:
    """Return the largest difference of cells that two runs share, intervals included."""
    cells = runs.pairs(*(read_csv(RESULTS / run) for run in (one, other)))
    return pd.DataFrame({"furthest": [max(cells["hi"].max() - 1, 1 - cells["lo"].min())]})


def cpu_pipelines(run: str, plane: str) -> pd.DataFrame:
    """Return throughput of four stages of 2 ms, B = 64, with samplers on a GPU and on CPUs."""
    samplings = of_run(RESULTS / run, 64, *SMALL)
    hot = json.loads((RESULTS / plane / "fit.json").read_text(encoding="utf-8"))["hot"]
    for design, rows_of_design in pd.read_csv(RESULTS / plane / "scaling.csv").groupby("design"):
        fastest = rows_of_design.loc[rows_of_design.rows_per_s.idxmax()]
        bus_us = 64 * hot[design] * 2 / 50e3  # bf16 logits at 50 GB/s
        name = f"{design}, {fastest.samplers:.0f} CPU samplers"
        samplings.append(Sampling(name, 0.0, (bus_us, 64e6 / fastest.rows_per_s)))
    rows = []
    for each in sorted(samplings, key=lambda one: one.on_stage_us + sum(one.beside_us)):
        adds = " + ".join(f"{us:.0f}" for us in each.beside_us or (each.on_stage_us,))
        for m in (4, 5, 6):
            state = steady_state(4, 2000.0, m, 64, each)
            row: dict[str, Any] = {"sampler": each.name, "adds": adds, "in_flight": m}
            row |= {"tokens_per_s": state.tokens_per_s, "bubble_pct": 100 * state.bubble}
            rows.append(row)
    return pd.DataFrame(rows)


def cpu_sizes(record: str) -> pd.DataFrame:
    """Return the best number of hot tokens, by the model and as measured."""
    facts = json.loads((RESULTS / record / "fit.json").read_text(encoding="utf-8"))
    cover = Coverage(facts["v"], np.array(facts["sizes"]), np.array(facts["mean"]))
    rows: list[dict[str, Any]] = []
    for both, name in ((False, "F, equation 10"), (True, "F2, the hot set always scanned")):
        optimum = best(cover, Cost(**facts["cost"]), both)
        row = {"name": name, "root": optimum.root, "hot": optimum.H}
        covered = float(cover.share(optimum.H))
        rows.append(row | {"covered": covered, "rows_per_s": 1e6 / optimum.cost_us})
    scans = pd.read_csv(RESULTS / record / "scans.csv")
    fastest = scans.loc[scans.row_us.idxmin()]
    row = {
        "name": "measured",
        "hot": fastest.h,
        "covered": fastest.hits,
        "rows_per_s": 1e6 / fastest.row_us,
    }
    cost = facts["cost"]
    return pd.DataFrame([*rows, row]).assign(c_ns=1e3 * cost["c_us"], c0_us=cost["c0_us"])
