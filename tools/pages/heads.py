"""Times of `score` and of quantised heads: docs/log-probabilities.md, docs/quantised-heads.md."""

from __future__ import annotations

import json
import math

import pandas as pd

from pages.blocks import (
    H200,
    HOPPER,
    MATMUL,
    PORTABLE,
    RESULTS,
    SMALL,
    block,
    bullets,
    medians,
    places,
    results,
    said,
    span,
    table,
    with_source,
)

SCORE = "score-20261123"
PARTS = "score-parts/parts.csv"
OURS = "flash_score"
RIVALS = {
    "score_log_softmax_compiled": "log_softmax and gather, compiled",
    "score_log_softmax": "the same, not compiled",
    "score_chunked": "chunked loss, 1024 rows",
}


def scores() -> pd.DataFrame:
    """Median times in us by B, a column for each provider."""
    found: pd.DataFrame = medians(SCORE).unstack("provider").droplevel("d")
    return found


@block
def score_times() -> str:
    us = scores()
    rows = [
        [f"{B:,}", f"{row[OURS]:,.0f}", f"{row[MATMUL]:,.0f}", f"{row[OURS] / row[MATMUL]:.2f}"]
        + [f"{row[name]:,.0f} ({row[name] / row[OURS]:.2f})" for name in RIVALS]
        for B, row in us.iterrows()
    ]
    heads = ["B", "`score`, us", "matmul alone", "ours / matmul", *RIVALS.values()]
    fused = us[OURS] / us[MATMUL]
    best = us[list(RIVALS)].min(axis=1) / us[OURS]
    slower = best[best < 1]
    told = (
        f"Up to B = 64 `score` takes {span(fused.loc[:64])} of the matmul alone, from 256 on "
        f"{span(fused.loc[256:])}.",
        f"The fastest rival takes {span(best[best >= 1])} times as long"
        + said(", but less at the largest batch: ", list(slower.index) == [us.index.max()])
        + f"{span(slower)} at B = {us.index.max():,}.",
    )
    return with_source(f"{table(heads, rows, left=0)}\n\n{bullets(*told)}", *places(SCORE))


@block
def score_parts() -> str:
    found = pd.read_csv(H200 / PARTS).set_index(["v", "b", "what"])
    us, busy = found.time_us.unstack(), found.busy_us.unstack()
    options = [name for name in busy if name.startswith("score, ")]
    rows = [
        [
            f"{V:,}",
            f"{B:,}",
            f"{busy.score[V, B]:,.0f}",
            f"{busy.score[V, B] / busy['product'][V, B]:.2f}",
            *(f"{100 * (busy[name][V, B] / busy.score[V, B] - 1):+.1f}" for name in options),
            f"{us.trained[V, B] / 1e3:,.1f} ({us.trained[V, B] / us.products[V, B]:.2f})",
            f"{us.chunked[V, B] / 1e3:,.1f} ({us.chunked[V, B] / us.products[V, B]:.2f})",
            f"{found.extra_mb[V, B, 'trained']:,.0f}",
            f"{found.extra_mb[V, B, 'chunked']:,.0f}",
        ]
        for V, B in us.index
    ]
    heads = [
        *("V", "B", "`score`, us", "over the matmul"),
        *(f"{name.removeprefix('score, ')}, %" for name in options),
        *("with backward, ms", "chunked loss, ms", "extra MB", "of the chunked loss"),
    ]
    rank = 100 * (busy["score, rank"] / busy.score - 1)
    trained, chunked = us.trained / us.products, us.chunked / us.products
    extra = found.extra_mb.unstack()
    told = (
        f"A rank costs {span(rank, '.1f')} % of the time that kernels run.",
        said("With its backward `score` is slower than a chunked loss", (trained > chunked).all())
        + f" of torch: {span(trained)} of the three products that both need at least, against "
        f"{span(chunked)}. It holds at most {extra.trained.max():,.0f} MB, the chunked loss up to "
        f"{extra.chunked.max():,.0f}. Take `score` for a rollout's bits or for its memory.",
    )
    return with_source(f"{table(heads, rows, left=0)}\n\n{bullets(*told)}", *places(PARTS))


def quantised_cells() -> pd.DataFrame:
    """time_us and ratio_to_matmul by d, b and sampler; tokens drawn, and those unequal to bf16's.

    Of the runs quantised-FORM-DATE, and verify/quantised-FORM.jsonl.
    """
    runs = sorted(path.parent.name for path in H200.glob("quantised-*/results.csv"))
    found = results(*runs)
    found = found[found.d == SMALL[0]]
    keys = ["run", "d", "b"]
    matmul = found[found.provider == MATMUL].set_index(keys).median_us
    found = found.assign(
        ratio_to_matmul=found.median_us / matmul[found.set_index(keys).index].values
    )
    names = {PORTABLE: "{}", "scaled_matmul": "scaled_{}", MATMUL: "matmul", HOPPER: "bf16"}
    found["sampler"] = [
        names[provider].format(form)
        for provider, form in zip(found.provider, found.weights, strict=True)
    ]
    told = [
        {"draws": line["draws"], "unequal": line["statistic"] if line["passed"] else math.inf}
        for path in sorted((H200 / "verify").glob("quantised-*.jsonl"))
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if line.get("name") == "quantised"
    ]
    kept = found.rename(columns={"median_us": "time_us"})
    kept = kept[["run", "d", "b", "sampler", "time_us", "ratio_to_matmul"]]
    found = pd.concat([kept.drop_duplicates(["d", "b", "sampler"]), pd.DataFrame(told)])
    return found.astype({"d": "Int64", "b": "Int64"})


def quantised() -> pd.DataFrame:
    """Over the matmul in bf16 by D and B, a column for each sampler."""
    found = quantised_cells()
    return found.pivot_table(index=["d", "b"], columns="sampler", values="ratio_to_matmul")


def _ratio(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


@block
def quantised_forms() -> str:
    """Of both kernels over the matmul in bf16, on an H100; of several tile shapes the fastest."""
    record = "h100/quantised-forms.csv"
    found = pd.read_csv(RESULTS / record)
    kernel = found.config.str.startswith("hopper").map({True: "hopper", False: "portable"})
    of_head = found[found.config.notna()].assign(kernel=kernel)
    us = of_head.pivot_table(
        index=["d", "b"], columns=["kernel", "weights"], values="time_us", aggfunc="min"
    )
    matmul = found[found.weights == "matmul"].set_index(["d", "b"]).time_us
    ratio = us.div(matmul, axis=0).loc[lambda table: table.index.get_level_values("b") <= 256]
    forms = [(name, weights) for name in ("hopper", "portable") for weights in ("fp8", "int8")]
    rows = [
        [D, B, f"{matmul[D, B]:.0f}", *(_ratio(row[form]) for form in forms)]
        for (D, B), row in ratio.iterrows()
    ]
    heads = ["D", "B", "matmul in bf16, us", "Hopper kernel, fp8", "int8", "portable, fp8", "int8"]
    return with_source(table(heads, rows, left=0), record)


@block
def quantised_times() -> str:
    ratio = quantised()
    names = {
        "fp8": "portable kernel, fp8",
        "int8": "int8",
        "bf16": "bf16",
        "scaled_fp8": "scaled matmul and one pass, fp8",
        "scaled_int8": "int8",
    }
    found = quantised_cells()
    us = found.dropna(subset="d").set_index(["d", "b", "sampler"]).time_us
    rows = [
        [D, B, f"{us[D, B, 'matmul']:.0f}", *(_ratio(row[name]) for name in names)]
        for (D, B), row in ratio.iterrows()
    ]
    heads = ["D", "B", "matmul in bf16, us", *names.values()]
    few = ratio[ratio.index.get_level_values("b") <= 64]
    told = (
        f"Up to B = 64 the portable kernel takes {span(few.fp8)} of the matmul in bf16 with e4m3, "
        f"{span(few.int8)} with int8.",
        _equal_draws(found.dropna(subset="draws")),
    )
    records = found.run.dropna().unique()
    return with_source(f"{table(heads, rows, left=0)}\n\n{bullets(*told)}", *places(*records))


def _equal_draws(drawn: pd.DataFrame) -> str:
    """How many tokens are those of bf16."""
    words = said("draws are those of a bf16 weight with the same numbers.", not drawn.unequal.any())
    return f"All of {drawn.draws.sum():,.0f} {words}"
