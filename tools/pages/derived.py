"""More rows of views: engines, filters, CPUs and the battery of tests; see computed.py."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from fsbench import paper
from fsbench.cli.hotvocab import of_run
from fsbench.records.summary import read_csv
from fsbench.report import against_paper as beside_paper
from fsbench.report import compare as runs
from fsbench.simple.hot import Coverage
from fsbench.simple.pipeline import Pipeline, Sampling, steady_state
from fsbench.simple.sizing import Cost, best
from pages.blocks import MATMUL, PORTABLE, RESULTS, SMALL
from pages.computed import measured, times


def engines(*runs: str) -> pd.DataFrame:
    """Return what each sampler saves of vLLM's time per token, as text."""
    rows = []
    for run in runs:
        found = pd.read_csv(RESULTS / run / "e2e.csv")
        of = found.set_index(["requests", "sampler", "b"]).sort_index()
        for requests, B in of.index.droplevel("sampler").unique():
            row: dict[str, Any] = {"model": found.model[0], "requests": requests, "b": B}
            for name in of.index.unique("sampler"):
                key, each = name.replace("-", "_"), of.loc[(requests, name, B)]
                row |= {f"{key}_ms": each.tpot_ms, f"{key}_pct": each.reduction_pct}
                row[key] = _saved(each)
            rows.append(row)
    return pd.DataFrame(rows)


def _saved(row: pd.Series) -> str:
    bound = "" if pd.isna(row.gpu_reduction_pct) else f" ({row.gpu_reduction_pct:.1f})"
    return f"{row.reduction_pct:.1f} ± {row.reduction_sd_pct:.1f}{bound}"


def released(*runs: str) -> pd.DataFrame:
    """Return cells of released samplers by request; ours is one sampler for all of them."""
    filtered = "flash_sampling_topk_topp"
    parts = []
    for run in runs:
        found = pd.read_csv(RESULTS / run / "results.csv").query("status == 'ok'")
        request = run.rsplit("/", 1)[1].rsplit("_d", 1)[0]
        if request == "plain":  # flash_sampling is there, too
            found = found[found.provider != filtered]
        parts.append(found.assign(request=request.replace("_", "-")))
    found = pd.concat(parts)
    found["provider"] = found.provider.replace(filtered, PORTABLE)
    found["extra_mb"] = found.peak_extra_bytes / 1e6
    order = found.query("request == 'default' and b == 64").groupby("provider").median_us.median()
    rank = found.provider.map(
        {MATMUL: -2.0, PORTABLE: -1.0}
        | {k: v for k, v in order.items() if k not in (MATMUL, PORTABLE)}
    )
    requests = found.request.map(["plain", "default", "top-p"].index)
    return found.assign(rank=rank, request_rank=requests).sort_values(["rank", "request_rank", "b"])


def released_best(*runs: str) -> pd.DataFrame:
    """Return ours, the matmul and the fastest other sampler by request, D and B.

    rival is the fastest of those that ran in a CUDA graph, as ours did; rival_any of all: two wait
    for the host, which a graph cannot capture.
    """
    found, keys = released(*runs), ["request", "d", "b"]
    us = found.pivot_table("median_us", keys, "provider")
    others = found[~found.provider.isin([MATMUL, PORTABLE])]
    fastest = others.groupby(keys).median_us.min()
    in_graphs = others[others.graph].groupby(keys).median_us.min()
    return (
        us.assign(rival=in_graphs, rival_any=fastest)
        .rename(columns={PORTABLE: "ours", MATMUL: "matmul"})
        .reset_index()
    )


FILTERS = {
    "k = 50, p = 0.9": (50, 0.9, 0.0),
    "k = 200, p = 0.9": (200, 0.9, 0.0),
    "k = 1000, p = 0.9": (1000, 0.9, 0.0),
    "min_p = 0.05": (0, 1.0, 0.05),
    "p = 0.9": (0, 0.9, 0.0),
    "p = 0.5": (0, 0.5, 0.0),
    "none": (0, 1.0, 0.0),
}


def filter_launches(file: str) -> pd.DataFrame:
    """Return times of truncated_sample by filters, and flash_sample's without (plain_us)."""
    found = pd.read_csv(RESULTS / file)
    found = found[found.logits == "normal:1"]
    plain = found[found.sampler == "plain"].set_index("b").span_us
    parts = [found[found.sampler == "plain"].assign(filters="`flash_sample`, none")]
    for words, filters in FILTERS.items():
        same = (found[["top_k", "top_p", "min_p"]] == list(filters)).all(axis=1)
        of = found[same & (found.sampler == "truncated")]
        parts.append(of.assign(filters=words))
    found = pd.concat(parts)
    return found.assign(plain_us=found.b.map(plain))


def filter_tensors(now_file: str, before_file: str) -> pd.DataFrame:
    """Return times of filters as numbers and as tensors, and before rows of tensors were tested."""
    keys = ["sampler", "given", "top_k", "top_p", "min_p", "b"]
    now, before = (
        pd.read_csv(RESULTS / name, keep_default_na=False)[[*keys, "span_us"]]
        for name in (now_file, before_file)
    )
    found = now.merge(before.rename(columns={"span_us": "searched_us"}), on=keys, how="left")
    found = found[found.top_p != 0.5]  # in tensors it was tested then, and is searched since
    found.loc[found.given != "tensors", "searched_us"] = math.nan
    found["filters"] = [_filter_words(row) for row in found.itertuples()]
    return found


def _filter_words(row: Any) -> str:
    known = {"plain": "`flash_sample`, none", "matmul": "the matmul alone"}
    words = [f"k = {row.top_k.replace('and', 'or')}"] if str(row.top_k) != "0" else []
    words += [f"p = {row.top_p}"] if row.top_p < 1 else []
    words += [f"min_p = {row.min_p}"] if row.min_p > 0 else []
    return known.get(row.sampler) or ", ".join(words)


def cpu_exposed(host: str, run: str) -> pd.DataFrame:
    """Return by B the time that a GPU waits for the CPUs, and what samplers on it add to a step."""
    waits = pd.read_csv(RESULTS / host / "overlap.csv").rename(
        columns={"exposed_serial_us": "serial", "exposed_overlapped_us": "overlapped"}
    )
    waits = waits.pivot_table(["serial", "overlapped"], "b", "design")
    waits.columns = ["_".join(key) for key in waits.columns]
    adds = times(run).query("d == 4096").set_index("b").drop(columns=["d", "v"])
    return adds.sub(adds[MATMUL], axis=0).join(waits).reset_index()


def cpu_pipelines(run: str, plane: str) -> pd.DataFrame:
    """Return throughput of four stages of 2 ms, B = 64, with samplers on a GPU and on CPUs."""
    samplings = of_run(RESULTS / run, 64, *SMALL)
    hot = json.loads((RESULTS / plane / "fit.json").read_text(encoding="utf-8"))["hot"]
    for design, of in pd.read_csv(RESULTS / plane / "scaling.csv").groupby("design"):
        fastest = of.loc[of.rows_per_s.idxmax()]
        bus_us = 64 * hot[design] * 2 / 50e3  # bf16 logits at 50 GB/s
        name = f"{design}, {fastest.samplers:.0f} CPU samplers"
        samplings.append(Sampling(name, 0.0, (bus_us, 64e6 / fastest.rows_per_s)))
    rows = []
    for each in sorted(samplings, key=lambda one: one.on_stage_us + sum(one.beside_us)):
        adds = " + ".join(f"{us:.0f}" for us in each.beside_us or (each.on_stage_us,))
        for m in (4, 5, 6):
            found = steady_state(Pipeline((2000.0,) * 4, m, 64), each)
            row = {"sampler": each.name, "adds": adds, "in_flight": m}
            rows.append(
                row | {"tokens_per_s": found.tokens_per_s, "bubble_pct": 100 * found.bubble}
            )
    return pd.DataFrame(rows)


def cpu_sizes(record: str) -> pd.DataFrame:
    """Return the best number of hot tokens, by the model and as measured."""
    facts = json.loads((RESULTS / record / "fit.json").read_text(encoding="utf-8"))
    cover = Coverage(facts["v"], *(np.array(facts[name]) for name in ("sizes", "mean", "low")))
    rows: list[dict[str, Any]] = []
    for both, name in ((False, "F, equation 10"), (True, "F2, the hot set always scanned")):
        found = best(cover, Cost(**facts["cost"]), both)
        root = "-" if found.root is None else f"{found.root:,.0f}"
        row = {"name": name, "root": root, "hot": found.H, "covered": float(cover.at(found.H))}
        rows.append(row | {"rows_per_s": 1e6 / found.cost_us})
    scans = pd.read_csv(RESULTS / record / "scans.csv")
    at = scans.loc[scans.row_us.idxmin()]
    row = {"name": "measured", "root": "", "hot": at.h, "covered": at.hits}
    return pd.DataFrame([*rows, row | {"rows_per_s": 1e6 / at.row_us}]).assign(
        c_ns=1e3 * facts["cost"]["c_us"], c0_us=facts["cost"]["c0_us"]
    )


@cache
def checks(folder: str) -> pd.DataFrame:
    """Return the checks of verify's full tier; one that was run twice counts as found last."""
    found = [
        json.loads(line)
        for path in sorted((RESULTS / folder).glob("*.jsonl"))
        if not path.stem.startswith("quantised-")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    rows = pd.DataFrame(line for line in found if "verdict" in line)
    return rows.drop_duplicates(["provider", "name"], keep="last").sort_values(
        "provider", kind="stable"
    )


def tails(folder: str) -> pd.DataFrame:
    """Return the share of a tail's probability that was drawn, by gap, where all gaps were run."""
    found = checks(folder)
    found = found[found.name.isin(["tail 16", "tail 18", "tail 20"])]
    found = found[found.groupby("provider").name.transform("size") == 3]
    return found.assign(gap=found.name.str.split().str[1].astype(int))


def served(*runs: str) -> pd.DataFrame:
    """Return how many tokens the plug-in drew, and how many it left to vLLM, by run."""
    rows = []
    for run in runs:
        text = (RESULTS / run / "steps.jsonl").read_text(encoding="utf-8")
        counts = [json.loads(line)["counts"] for line in text.splitlines() if '"counts"' in line]
        left = sum(sum(each["left"].values()) for each in counts)
        rows.append({"run": run, "served": sum(each["served"] for each in counts), "left": left})
    return pd.DataFrame(rows)


def equality(folder: str) -> pd.DataFrame:
    """Return how many tokens of the screened head were compared with flash_sample's, one row."""
    cases, tokens = (
        pd.read_csv(RESULTS / name) for name in (f"{folder}/cases.csv", "h200/screened-tokens.csv")
    )
    (many,) = json.loads((RESULTS / folder / "equality.json").read_text(encoding="utf-8"))[
        "equality"
    ]
    row = {
        "draws": many["draws"],
        "unequal": cases.unequal.sum() + many["unequal"] + tokens.unequal.sum(),
        "in_full": cases.in_full.sum() + many["in_full"],
    }
    for name, of in (("verify", ""), ("verify-greedy", "_greedy")):
        lines = (RESULTS / folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()[1:]
        passed = [json.loads(line)["passed"] for line in lines]
        row |= {f"passed{of}": sum(passed), f"checks{of}": len(passed)}
    return pd.DataFrame([row])


def prepare_seconds(folder: str) -> pd.DataFrame:
    """Return the seconds that prepare_head took."""
    facts = json.loads((RESULTS / folder / "cases.json").read_text(encoding="utf-8"))
    return pd.DataFrame({"seconds": list(facts["prepare_s"].values())})


def beside_the_paper(run: str) -> pd.DataFrame:
    """Return our speedups over the paper's on an H200 (Tables 4 and 5), with verdicts."""
    fused = paper.source()["fused"]["provider"]
    found = beside_paper.compare(measured(run), "h200", fused)
    cells = pd.concat([cells for _, cells in found], ignore_index=True)
    verdicts = [str(beside_paper.verdict(ratio, beside_paper.WITHIN)) for ratio in cells.ratio]
    return cells.assign(verdict=verdicts)


def two_runs(one: str, other: str) -> pd.DataFrame:
    """Return how far the cells that two runs share differ, their intervals included."""
    cells = runs.pairs(*(read_csv([RESULTS / run]) for run in (one, other)))
    return pd.DataFrame({"furthest": [max(cells["hi"].max() - 1, 1 - cells["lo"].min())]})
