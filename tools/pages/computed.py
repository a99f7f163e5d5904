"""Rows of views that follow from records by more than an expression; tables.toml names them."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pandas as pd

from fsbench import paper
from fsbench.kernels.configs.choice import WORTH_SPLITTING
from fsbench.kernels.configs.hopper import BLOCK_TOKENS
from fsbench.kernels.shard.vocab_shard import even_blocks
from fsbench.problem import models as named_models
from fsbench.records.summary import read_csv
from fsbench.report import logits_store
from fsbench.report.attribution import attribute, extend
from fsbench.report.tables import Configuration, configurations
from pages.blocks import HOPPER, MATMUL, ONE_PASS, PORTABLE, RESULTS

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


def times(*names: str, value: str = "median_us") -> pd.DataFrame:
    """Return a value of the measured cells of runs by d, v and b, a column for each sampler."""
    found = pd.concat(pd.read_csv(RESULTS / name / "results.csv") for name in names)
    found = found[found.status == "ok"]
    return found.pivot_table(value, ["d", "v", "b"], "provider").reset_index()


def heads_of_models(run: str) -> pd.DataFrame:
    """Return, by model and B, the faster kernel over the matmul, and the fastest other over it."""
    us = times(run)
    us["portable"], us["hopper"] = us[PORTABLE] / us[MATMUL], us[HOPPER] / us[MATMUL]
    us["ratio"] = us[HOPPER] / us[MATMUL]
    us["other"] = us[[ONE_PASS, FI2_LEAN]].min(axis=1)
    us["lead"] = us.other / us[HOPPER]
    models = pd.DataFrame([{"model": m.name, "d": m.D, "v": m.V} for m in named_models().values()])
    return models.merge(us, on=["d", "v"], how="inner")


def last_of_each_batch(*runs: str) -> pd.DataFrame:
    """Return times by B of D = 4096: of several runs those of the last that has a B."""
    found = pd.concat([times(run).assign(run=run) for run in runs], ignore_index=True)
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


def measured(*runs: str) -> list[Configuration]:
    return configurations(read_csv([RESULTS / run for run in runs]))


def attribution(*runs: str) -> pd.DataFrame:
    """Return the parts of the Hopper kernel's speedups over three samplers, D = 4096."""
    (configuration,) = [each for each in measured(*runs) if "d4096" in each.stem]
    parts = []
    for name in (FI2, FI2_LEAN, ONE_PASS):
        found = attribute(configuration, HOPPER, name, MATMUL).rename_axis("b").reset_index()
        parts.append(found.assign(over=LABELS[name]))
    return pd.concat(parts, ignore_index=True)


def two_terms(*runs: str) -> pd.DataFrame:
    """Return what the I/O model with two more terms finds of each sampler and head."""
    rows = []
    for name in list(LABELS)[:7]:
        for configuration in measured(*runs):
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
        for each in measured(run)
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
        us = times(run)
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
        parts.append(times(run).merge(launches, on="b"))
    found = pd.concat(parts, ignore_index=True)
    return found.assign(ratio=found.flash_sampling_topk_topp_screened / found[MATMUL])


def eight_gpus(run: str, *_: str) -> pd.DataFrame:
    """Return the time on eight GPUs as a model has it, from one to four and parts of the head.

    T(n) is the time of a step on n GPUs, S(n) that of the largest part on one GPU, and x(n) =
    T(n) - S(n) what the ranks cost each other. T(8) = S(8) + x(4) + max(0, x(4) - x(2)).
    """
    of_run = pd.read_csv(RESULTS / run / "results.csv")
    us = of_run.set_index(["d", "provider", "b", "tp"]).median_us
    rows = []
    for D, V in of_run[["d", "v"]].drop_duplicates().sort_values("d").values.tolist():
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
