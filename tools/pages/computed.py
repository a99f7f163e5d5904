"""Rows of views that follow from records by more than an expression; tables.toml names them."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from fsbench import paper
from fsbench.analysis import logits_store
from fsbench.analysis.attribution import attribute, extend
from fsbench.analysis.comparisons import paper as beside_paper
from fsbench.analysis.comparisons import runs
from fsbench.analysis.tables import Configuration, configurations
from fsbench.cli.hotvocab import of_run
from fsbench.kernels.configs.choice import WORTH_SPLITTING
from fsbench.kernels.configs.hopper import BLOCK_TOKENS
from fsbench.kernels.shard.vocab_shard import even_blocks
from fsbench.problem import models as named_models
from fsbench.records.summary import read_csv
from fsbench.simple.hot import Coverage
from fsbench.simple.pipeline import Pipeline, Sampling, steady_state
from fsbench.simple.sizing import Cost, best
from pages.blocks import HOPPER, MATMUL, ONE_PASS, PORTABLE, RESULTS, SMALL

FI2, FI2_LEAN, STREAM = "flashinfer_gumbel", "flashinfer_gumbel_lean", "weight_stream"
LABELS = {
    FI2: "FI2",
    "flashinfer_top_k_top_p": "FI1",
    "multinomial_compiled": "multinomial, compiled",
    "exponential_race": "exponential race (vLLM)",
    FI2_LEAN: "FI2, lean",
    "flashinfer_top_k_top_p_lean": "FI1, lean",
    ONE_PASS: "matmul + one-pass argmax",
    HOPPER: "FlashSampling (Hopper)",
    PORTABLE: "FlashSampling (Triton)",
    MATMUL: "matmul alone",
}
MULTIPROCESSORS = 132
"""Of an H200."""


def _wide(*names: str, value: str = "median_us") -> pd.DataFrame:
    """Return a value of the measured cells of runs by d, v and b, a column for each sampler."""
    found = pd.concat(pd.read_csv(RESULTS / name / "results.csv") for name in names)
    found = found[found.status == "ok"]
    return found.pivot_table(value, ["d", "v", "b"], "provider").reset_index()


def heads_of_models(run: str) -> pd.DataFrame:
    """Return, by model and B, the faster kernel over the matmul, and the fastest other over it."""
    us = _wide(run)
    us["portable"], us["hopper"] = us[PORTABLE] / us[MATMUL], us[HOPPER] / us[MATMUL]
    us["ratio"] = us[HOPPER] / us[MATMUL]
    us["other"] = us[[ONE_PASS, FI2_LEAN]].min(axis=1)
    us["lead"] = us.other / us[HOPPER]
    models = pd.DataFrame([{"model": m.name, "d": m.D, "v": m.V} for m in named_models().values()])
    return models.merge(us, on=["d", "v"], how="inner")


def last_of_each_batch(*runs: str) -> pd.DataFrame:
    """Return times by B of D = 4096: of several runs those of the last that has a B."""
    found = pd.concat([_wide(run).assign(run=run) for run in runs], ignore_index=True)
    return found.drop_duplicates("b", keep="last").sort_values("b", ignore_index=True)


def costs(warm_run: str, cold_run: str) -> pd.DataFrame:
    """Return energy, memory and first calls of the samplers of two runs."""
    warm, cold = (
        pd.read_csv(RESULTS / run / "results.csv").set_index(["provider", "b"])
        for run in (warm_run, cold_run)
    )
    seconds = [pd.read_csv(RESULTS / run / "results.csv") for run in (warm_run, cold_run)]
    assert all("first_call_s" in each for each in seconds)
    order = (HOPPER, PORTABLE, FI2, FI2_LEAN, "flashinfer_top_k_top_p", "multinomial_compiled")
    return pd.DataFrame(
        {
            "label": LABELS[name],
            **{f"j{B}": 1e3 * warm.j_per_token[name, B] for B in (1, 16, 64, 256)},
            "extra_mb": warm.peak_extra_bytes[name, 256] / 1e6,
            "extra_mb_1": warm.peak_extra_bytes[name, 1] / 1e6,
            "cold_s": _seconds(cold.first_call_s[name, 1]),
            "warm_s": _seconds(warm.first_call_s[name, 1]),
            "idle_w": warm.idle_w.iloc[0],
            "provider": name,
        }
        for name in (*order, "exponential_race", ONE_PASS, MATMUL)
    )


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value > 0.3 else f"{value:.2f}" if value > 0.005 else f"{value:.4f}"


def split_heads(file: str) -> pd.DataFrame:
    """Return times of each head, in the order of what the last round of blocks leaves room for."""
    us = pd.read_csv(RESULTS / file).pivot(index=["d", "v", "b"], columns="what", values="time_us")
    us = us.reset_index()
    blocks = -(-us.v // BLOCK_TOKENS)
    room = -blocks % MULTIPROCESSORS * BLOCK_TOKENS * us.d * 2
    splits = (blocks > MULTIPROCESSORS) & (room >= WORTH_SPLITTING)
    us["split_us"] = [
        f"**{x:.1f}**" if bold else f"{x:.1f}" for x, bold in zip(us.split, splits, strict=True)
    ]
    us["rounds"], us["room_mb"] = blocks / MULTIPROCESSORS, room / 1e6
    us["read_once"] = us.groupby(["d", "v"]).stream.transform("median")
    return us.sort_values(["room_mb", "d", "v", "b"], ascending=[False, False, False, True])


def options(file: str) -> pd.DataFrame:
    """Return what options cost in percent of plain sampling, in brackets their bytes' time."""
    found = pd.read_csv(RESULTS / file)
    plain = found[found.option == "plain"].set_index(["d", "b"]).time_us
    own = 100 * found.floor_us / plain[pd.MultiIndex.from_frame(found[["d", "b"]])].values
    cost = 100 * (found.ratio_to_plain - 1)
    found["cost"] = [
        f"{c:+.1f} ({o:.1f})" if o >= 0.05 else f"{c:+.1f}" for c, o in zip(cost, own, strict=True)
    ]
    return found[(found.option != "plain") & found.b.isin([1, 16, 64, 256])]


def _configurations(*runs: str) -> list[Configuration]:
    return configurations(read_csv([RESULTS / run for run in runs]))


def attribution(*runs: str) -> pd.DataFrame:
    """Return the parts of the Hopper kernel's speedups over three samplers, D = 4096."""
    (configuration,) = [each for each in _configurations(*runs) if "d4096" in each.stem]
    parts = []
    for name in (FI2, FI2_LEAN, ONE_PASS):
        found = attribute(configuration, HOPPER, name, MATMUL).rename_axis("b").reset_index()
        parts.append(found.assign(over=LABELS[name]))
    return pd.concat(parts, ignore_index=True)


def two_terms(*runs: str) -> pd.DataFrame:
    """Return what the I/O model with two more terms finds of each sampler and head."""
    rows = []
    for name in list(LABELS)[:7]:
        for configuration in _configurations(*runs):
            found = extend(configuration, name, MATMUL, STREAM)
            if found is None:
                continue
            rows.append(
                {
                    "sampler": LABELS[name],
                    "d": configuration.rows.d.iloc[0],
                    **{
                        key: getattr(found, key)
                        for key in ("kernels", "fixed_us", "gaps_us", "passes")
                    },
                    "worst_pct": 100 * found.worst,
                    "tried": ", ".join(map(str, found.held_out)),
                }
            )
    return pd.DataFrame(rows)


def sampling_shares(paper_run: str, lean_run: str) -> pd.DataFrame:
    """Return the share of the time in kernels that is sampling, in percent, D = 4096."""
    printed = paper.table(1).set_index(["method", "b"]).sampling_pct
    words = {
        "matmul": "by difference to its matmul form",
        "greedy": "by difference to its *greedy* form",
        "names": "names of kernels",
    }
    names = {
        "ours, one Gumbel a token, as the paper's": (lean_run, "flash_sampling_token"),
        "ours, portable": (paper_run, PORTABLE),
        "ours, Hopper": (paper_run, HOPPER),
        "FI2": (paper_run, FI2),
        "Multinomial": (paper_run, "multinomial_compiled"),
        "matmul + one-pass argmax": (lean_run, ONE_PASS),
    }
    rows = [
        {"label": f"{method}, paper", "split_by": "profilers", "b": B, "pct": printed[method, B]}
        for method in ("FlashSampling", "FI2", "Multinomial")
        for B in (1, 16, 64, 256)
    ]
    for label, (run, name) in names.items():
        of = pd.read_csv(RESULTS / run / "results.csv")
        of = of[(of.d == 4096) & (of.provider == name) & of.b.isin([1, 16, 64, 256])]
        whole = of.matmul_us + of.sampling_us + of.other_us
        rows += [
            {"label": label, "split_by": words[by], "b": B, "pct": pct}
            for by, B, pct in zip(of.split_by, of.b, 100 * of.sampling_us / whole, strict=True)
        ]
    return pd.DataFrame(rows)


def logits_store_overhead(run: str) -> pd.DataFrame:
    """Return what storing the logits costs, by head and B (Table 9 of the paper)."""
    return pd.concat(
        logits_store.overhead(each).rename_axis("b").reset_index().assign(d=each.rows.d.iloc[0])
        for each in _configurations(run)
    )


def mismatch(file: str) -> pd.DataFrame:
    """Return how far every pair of rollout and trainer is apart, by kind of logits, as text."""
    names = {"bf16": "bf16 logits and softmax", "log_softmax": "bf16 logits, fp32 softmax"}
    found = pd.read_csv(RESULTS / file)
    order = found.drop_duplicates(["rollout", "trainer"])
    pairs = found.groupby(["rollout", "trainer", "logits"], sort=False).max(numeric_only=True)
    columns = {
        "mean": ".1e",
        "max": ".1e",
        "kl": ".1e",
        "beyond_0.01": ".0%",
        "beyond_0.001": ".0%",
        "unequal": ".0%",
    }
    return pd.DataFrame(
        {
            "rollout": names.get(rollout, rollout),
            "trainer": names.get(trainer, trainer),
            **{
                column.replace("_0.", "_0"): " / ".join(
                    f"{value:{form}}" if value else "0"
                    for value in (
                        pairs.loc[(rollout, trainer, law), column] for law in found.logits.unique()
                    )
                )
                for column, form in columns.items()
            },
        }
        for rollout, trainer in zip(order.rollout, order.trainer, strict=True)
    )


def quantised(*runs: str) -> pd.DataFrame:
    """Return times over the matmul in bf16 by B, a column for each form of the head, D = 4096."""
    names = {PORTABLE: "{}", "scaled_matmul": "scaled_{}", MATMUL: "matmul", HOPPER: "bf16"}
    parts = []
    for run in runs:
        found = pd.read_csv(RESULTS / run / "results.csv").query("status == 'ok' and d == 4096")
        us = found.pivot(index=["d", "b"], columns="provider", values="median_us")
        form = found.weights.dropna().iloc[0]
        ratio = us.div(us[MATMUL], axis=0).drop(columns=MATMUL)
        ratio = ratio.rename(columns={each: names[each].format(form) for each in ratio})
        parts.append(ratio.assign(matmul_us=us[MATMUL]))
    return parts[0].combine_first(parts[1]).reset_index()


def quantised_draws(*files: str) -> pd.DataFrame:
    """Return how many draws of quantised heads were compared with bf16's, and how many differ."""
    lines = [json.loads(line) for file in files for line in (RESULTS / file).open(encoding="utf-8")]
    return pd.DataFrame(
        {"draws": line["draws"], "unequal": line["statistic"] if line["passed"] else math.inf}
        for line in lines
        if line.get("name") == "quantised"
    )


def quantised_forms(file: str) -> pd.DataFrame:
    """Return both kernels over the matmul in bf16; of several tile shapes the fastest."""
    found = pd.read_csv(RESULTS / file)
    kernel = np.where(found.config.str.startswith("hopper", na=False), "hopper_", "portable_")
    found["form"] = kernel + found.weights
    us = found.pivot_table("time_us", ["d", "b"], "form", aggfunc="min")
    matmul = found[found.weights == "matmul"].set_index(["d", "b"]).time_us
    return us.div(matmul, axis=0).assign(matmul_us=matmul).reset_index()


def screened(*runs: str) -> pd.DataFrame:
    """Return times of the screened head, with those of its two launches."""
    parts = []
    for run in runs:
        us = _wide(run)
        of = pd.read_csv(RESULTS / run / "breakdown.csv").query(
            "provider == 'flash_sampling_screened'"
        )
        of = of.assign(part=np.where(of.kernel == "resolve_kernel", "exact", "screen"))
        launches = of.pivot_table("mean_us", "b", "part", aggfunc="sum").reset_index()
        parts.append(us.merge(launches, on="b"))
    found = pd.concat(parts, ignore_index=True)
    return found.assign(ratio=found.flash_sampling_screened / found[MATMUL])


def screened_filters(*runs: str) -> pd.DataFrame:
    """Return times of a default request from the screen, with those of its launches."""
    parts = []
    for run in runs:
        of = pd.read_csv(RESULTS / run / "breakdown.csv")
        of = of[of.provider == "flash_sampling_topk_topp_screened"]
        launches = of.pivot(index="b", columns="kernel", values="mean_us").reset_index()
        parts.append(_wide(run).merge(launches, on="b"))
    found = pd.concat(parts, ignore_index=True)
    return found.assign(ratio=found.flash_sampling_topk_topp_screened / found[MATMUL])


def eight_gpus(run: str, *_: str) -> pd.DataFrame:
    """Return the time on eight GPUs as a model has it, from one to four and parts of the head.

    T(n) is the time of a step on n GPUs, S(n) that of the largest part on one GPU, and x(n) =
    T(n) - S(n) what the ranks cost each other. T(8) = S(8) + x(4) + max(0, x(4) - x(2)).
    """
    times = pd.read_csv(RESULTS / run / "results.csv")
    us = times.set_index(["d", "provider", "b", "tp"]).median_us
    rows = []
    for D, V in times[["d", "v"]].drop_duplicates().sort_values("d").values.tolist():
        folders = {n: f"h200/shards-20261122/d{D}_v{largest_shard(V, n)}" for n in (1, 2, 4, 8)}
        alone = {
            n: pd.read_csv(RESULTS / folder / "results.csv").set_index(["provider", "b"]).median_us
            for n, folder in folders.items()
        }
        # cuBLAS takes other kernels for shards of other sizes: not modelled.
        for name, B in sorted(
            alone[8].drop(MATMUL, level="provider").index, key=lambda key: key[1]
        ):
            T = {n: us[D, name, B, n] for n in (1, 2, 4)}
            S = {n: of[name, B] for n, of in alone.items()}
            eight = predicted(T, S, 8)
            rows.append(
                {"d": D, "provider": name, "b": B, "t1": T[1], "t2": T[2], "t4": T[4]}
                | {"t4_model": predicted(T, S, 4), "s8": S[8], "t8": eight}
                | {"ideal": 100 * T[1] / (8 * eight)}
            )
    return pd.DataFrame(rows)


def largest_shard(V: int, ranks: int) -> int:
    """Return the tokens of the largest of `ranks` shards."""
    return max(end - begin for begin, end in pairwise(even_blocks(V, ranks)))


def predicted(whole: dict[int, float], shard: dict[int, float], ranks: int) -> float:
    """Return T(ranks) from T and S, by number of GPUs, at half and a quarter of them."""
    half, quarter = (whole[n] - shard[n] for n in (ranks // 2, ranks // 4))
    return shard[ranks] + half + max(0.0, half - quarter)


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
    adds = _wide(run).query("d == 4096").set_index("b").drop(columns=["d", "v"])
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
    found = beside_paper.compare(_configurations(run), "h200", fused)
    cells = pd.concat([cells for _, cells in found], ignore_index=True)
    verdicts = [str(beside_paper.verdict(ratio, beside_paper.WITHIN)) for ratio in cells.ratio]
    return cells.assign(verdict=verdicts)


def two_runs(one: str, other: str) -> pd.DataFrame:
    """Return how far the cells that two runs share differ, their intervals included."""
    cells = runs.pairs(*(read_csv([RESULTS / run]) for run in (one, other)))
    return pd.DataFrame({"furthest": [max(cells["hi"].max() - 1, 1 - cells["lo"].min())]})
