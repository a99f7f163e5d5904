"""The screened head: docs/screened-head.md."""

from __future__ import annotations

import json
import math

import pandas as pd

from fsbench.kernels.screened import bounds, copied, sizes
from pages.blocks import (
    H200,
    LARGE,
    MATMUL,
    PORTABLE,
    RESULTS,
    SMALL,
    block,
    bullets,
    medians,
    place,
    places,
    results,
    said,
    span,
    table,
    with_source,
)

RUNS = {4096: "screened-d4096-20261125", 8192: "screened-d8192-20261123"}
H100 = "h100/screened-d4096-20261123"
CASES, TOKENS = "screened-cases-20261122", "screened-tokens.csv"
OURS, GREEDY = "flash_sampling_screened", "greedy_screened"
FILTERED, FROM_WEIGHT = "flash_sampling_topk_topp_screened", "flash_sampling_topk_topp"
HEADS = {
    "SmolLM2-135M": "SmolLM2-135M, LM head",
    "MiniLM-L6-v2": "MiniLM-L6-v2, word embeddings",
    "normal": "normal numbers",
}


@block
def slacks() -> str:
    """The constants of the proof, as the code has them."""
    constants = {
        "(D + 8) 2^-23, D = 4,088": (bounds.accumulation_error(4088), "the fp32 sum, in any order"),
        "LARGEST_STEPS": (bounds.LARGEST_STEPS, "hidden is in steps of its largest / this"),
        "INFLATION - 1": (bounds.INFLATION - 1, "the bound's own arithmetic"),
        "ROUNDING": (bounds.ROUNDING, "the screen's arithmetic, and roundings of the score"),
        "NOISE_SLACK": (bounds.NOISE_SLACK, "times T: the noise of the sampler and the screen's"),
        "GROUP_SLACK": (bounds.GROUP_SLACK, "in its place under group noise"),
        "BIAS_SLACK": (bounds.BIAS_SLACK, "times a bias"),
        "CAP_SLACK": (bounds.CAP_SLACK, "times a soft cap"),
        "ABSOLUTE_SLACK": (bounds.ABSOLUTE_SLACK, "underflow"),
        "LARGEST_TEMPERATURE": (bounds.LARGEST_TEMPERATURE, "above it bounds are infinite"),
        "LARGEST_ENTRY": (
            copied.LARGEST_ENTRY,
            "rows of the weight above it are not screened",
        ),
        "SMALLEST_MAXIMUM": (bounds.SMALLEST_MAXIMUM, "rows below it are all residual"),
        "LARGEST_D": (sizes.LARGEST_D, "so that integer sums are exact"),
    }
    rows = [[name, _power(value), why] for name, (value, why) in constants.items()]
    return table(["constant", "value", "for"], rows, left=3)


def _power(value: float) -> str:
    """'2^-18' of a power of two; the number of others."""
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:,}"


@block
def candidates() -> str:
    """How many tokens may have the best score, on a CPU."""
    found = pd.read_csv(RESULTS / "screen" / "candidates.csv")
    by_scales = found[found.noise != "group"].pivot_table(
        index=["head", "V", "D", "sigma", "temperature"],
        columns="scales",
        values=["bound", "candidates", "most"],
    )
    rows = []
    for (name, V, D, sigma, T), row in by_scales.iterrows():
        left = [f"{row['candidates', s]:.1f} ({row['most', s]:.0f})" for s in ("row", "128")]
        width = f"{row['bound', 'row']:.2f}"
        rows.append([HEADS[name], f"{V:,} x {D}", f"{sigma:.1f}", f"{T:g}", width, *left])
    heads = [
        *("head", "V x D", "sigma", "T", "bound", "candidates, mean (most)"),
        "with a scale for each 128 columns",
    ]
    told = f"The largest actual error was {span(found.error)} of its bound."
    return f"{table(heads, rows)}\n\n{told}"


@block
def candidates_by_noise() -> str:
    found = pd.read_csv(RESULTS / "screen" / "candidates.csv")
    found = found[(found.scales == "row") & (found.temperature == 1)].pivot_table(
        index=["head", "D", "sigma"], columns="noise", values=["candidates", "fetched"]
    )
    rows = []
    for (name, D, sigma), row in found.dropna().iterrows():
        cells = [
            text
            for noise in ("token", "group")
            for text in (f"{row['candidates', noise]:.1f}", f"{row['fetched', noise]:.0f}")
        ]
        rows.append([f"{HEADS[name].split(',')[0]}, D = {D}", f"{sigma:.1f}", *cells])
    heads = [
        *("head", "sigma", "candidates, token noise", "rows of the weight read"),
        *("groups, group noise", "rows of the weight read"),
    ]
    return table(heads, rows)


@block
def screened_times(*runs: str) -> str:
    """Of both LM heads on an H200, or of these records."""
    rows = []
    found = dict(zip(RUNS, runs or RUNS.values(), strict=False))
    for D, run in found.items():
        us = medians(run).unstack("provider").loc[D]
        parts = pd.read_csv(RESULTS / place(run) / "breakdown.csv").query(f"provider == '{OURS}'")
        parts = parts.assign(exact=parts.kernel == "resolve_kernel")
        of = parts.groupby(["b", "exact"]).mean_us.sum().unstack()
        for B, row in us.iterrows():
            ratio = row[OURS] / row[MATMUL]
            others = (row[name] for name in (PORTABLE, GREEDY, "greedy"))
            cells = [D, B, f"{row[OURS]:.0f}", f"{row[MATMUL]:.0f}", f"{ratio:.2f}"]
            cells += [f"{of[exact][B]:.0f}" for exact in (False, True)]
            rows.append([*cells, *(f"{time:.0f}" for time in others)])
    heads = [
        *("D", "B", f"`{OURS}`", "matmul", "ratio", "screen", "exact part"),
        *(f"`{name}`" for name in (PORTABLE, GREEDY, "greedy")),
    ]
    return with_source(table(heads, rows, left=0), *places(*found.values()))


@block
def screened_findings() -> str:
    """When it pays."""
    cases = pd.read_csv(H200 / CASES / "cases.csv")
    us = medians(*RUNS.values()).unstack("provider")
    greedy = us[GREEDY] / us["greedy"]
    many = (us[OURS] / us[PORTABLE]).xs(128, level="b")
    h100 = medians(H100).unstack("provider").loc[4096, 128]
    few = cases[cases.b <= 16].groupby("d").ratio_to_matmul
    worst = cases[cases.d == 4096].ratio_to_matmul.max()
    large = cases.query("d == 8192 and b == 64")
    losing = large[large.ratio_to_matmul >= 1].candidates.min()
    prepared = json.loads((H200 / CASES / "cases.json").read_text())["prepare_s"]
    memory = results(RUNS[4096]).query(f"provider == '{OURS}' and b == 1").peak_extra_bytes.iloc[0]
    lines = (
        said("Up to B = 16 it pays whatever the logits: ", few.max().max() < 1)
        + f"{span(few.get_group(4096))} of the matmul at "
        f"D = 4096, {span(few.get_group(8192))} at D = 8192.",
        said("At D = 4096 it pays up to B = 64: ", worst < 1)
        + f"at most {worst:.2f} of the matmul in any case below.",
        f"At D = 8192 and B = 64 it depends on the logits. It was slower than the matmul from "
        f"{losing:.0f} candidates a row on; `sample.found` counts them.",
        said("Above B = 64 take `flash_sample` on an H200: ", many.min() > 1)
        + f"at B = 128 the screen takes {span(many)} times as long. "
        f"On an H100 it takes {h100[OURS] / h100[PORTABLE]:.2f} of the time at D = 4096.",
        f"Greedy decoding takes {span(greedy.loc[4096].loc[:64])} of `greedy` up to B = 64 at "
        f"D = 4096, and {span(greedy.loc[8192].loc[:32])} up to B = 32 at D = 8192.",
        f"It needs {memory / 1e9:.2f} GB beside a head of {2 * SMALL[0] * SMALL[1] / 1e9:.2f} GB "
        f"(D = 4096, V = 151,936). `prepare_head` takes {span(prepared.values())} s.",
    )
    records = places(*RUNS.values(), f"{CASES}/cases.json", H100)
    return with_source(bullets(*lines), *records)


@block
def hard_cases() -> str:
    cases = pd.read_csv(H200 / CASES / "cases.csv")
    rows = []
    for case, of in cases.groupby("case", sort=False):
        of = of.sort_values(["d", "b"])
        rows.append(
            [case, *(f"{row.time_us:.0f} ({row.candidates:.0f})" for row in of.itertuples())]
        )
    shapes = cases[["d", "b"]].drop_duplicates().sort_values(["d", "b"])
    heads = ["case", *(f"D = {row.d}, B = {row.b}" for row in shapes.itertuples())]
    return with_source(table(heads, rows), *places(f"{CASES}/cases.json"))


@block
def equal_tokens() -> str:
    """Draws that were compared with those of flash_sample."""
    cases, tokens = pd.read_csv(H200 / CASES / "cases.csv"), pd.read_csv(H200 / TOKENS)
    (many,) = json.loads((H200 / CASES / "equality.json").read_text())["equality"]
    unequal = cases.unequal.sum() + many["unequal"] + tokens.unequal.sum()
    in_full = cases.in_full.sum() + many["in_full"]
    passed = []
    for name in ("verify", "verify-greedy"):
        text = (H200 / CASES / f"{name}.jsonl").read_text(encoding="utf-8")
        checks = [json.loads(line)["passed"] for line in text.splitlines()[1:]]
        passed.append(f"{sum(checks)} of {len(checks)}")
    return (
        f"{cases.draws.sum():,} draws of the cases above, and {many['draws']:,} of one long "
        f"comparison (D = 4096, V = 151,936, sigma 0.1 to 16, T from 0.3 to 1.5): {unequal} differ "
        f"from `flash_sample`'s, and {in_full} rows had to be computed in full. `{OURS}` passes "
        f"{passed[0]} checks of the tier `ci` of `fsbench verify`, `{GREEDY}` {passed[1]}. "
        f"[Record](ROOT/results/h200/{CASES})."
    )


@block
def screened_filters() -> str:
    """A default request from the screen: times, and those of its launches."""
    names = [
        f"{name}_kernel"
        for name in ("filter_screen", "filter_leaders", "filter_candidates", "filter_resolve")
    ] + ["sampling_look_kernel"]
    rows, runs = [], []
    for D in (SMALL[0], LARGE[0]):
        runs.append(f"screened-filters-20261124/d{D}")
        us = medians(runs[-1]).unstack("provider").loc[D]
        parts = pd.read_csv(H200 / runs[-1] / "breakdown.csv")
        parts = parts[parts.provider == FILTERED]
        parts = parts.pivot(index="b", columns="kernel", values="mean_us")
        for B, of in us.iterrows():
            rows.append(
                [
                    *(D, B),
                    *(f"{of[name]:.0f}" for name in (MATMUL, FROM_WEIGHT)),
                    f"{of[FILTERED]:.0f} ({of[FILTERED] / of[MATMUL]:.2f})",
                    *(f"{parts[name][B]:.0f}" for name in names),
                ]
            )
    heads = ["D", "B", "matmul, us", "from the weight", "from the screen (over the matmul)"]
    heads += ["screen", "leaders", "candidates", "resolve", "filters"]
    return with_source(table(heads, rows), *places(*runs))
