"""Beside the paper: docs/paper.md, docs/comparing.md and docs/io-model.md."""

from __future__ import annotations

import pandas as pd

from fsbench import paper
from fsbench.records.summary import read_csv
from fsbench.report import against_paper as beside_paper
from fsbench.report import compare as runs
from fsbench.report import logits_store
from fsbench.report.attribution import attribute, extend
from fsbench.report.tables import Configuration, configurations
from pages import engines
from pages.blocks import (
    FI1,
    FI2,
    FI2_LEAN,
    H200,
    HOPPER,
    MATMUL,
    ONE_PASS,
    PORTABLE,
    STEMS,
    STREAM,
    block,
    listed,
    places,
    results,
    said,
    span,
    table,
    with_source,
)
from pages.speed import ALL, HEADS, LEAN, MULTINOMIAL, ODD, OURS, PAPER, RACE, at, leads

STORE = "store-20261121"
TOLD_APART = {
    "matmul": "by difference to its matmul form",
    "greedy": "by difference to its *greedy* form",
    "names": "names of kernels",
}


def _configurations(*names: str) -> dict[str, Configuration]:
    found = configurations(read_csv([H200 / name for name in names]))
    return {configuration.stem: configuration for configuration in found}


@block
def claims() -> str:
    """What of the paper's claims holds on an H200, in numbers."""
    small = pd.concat([at(leads(PAPER, ours=ours), 1, 64) for ours in OURS])
    lean = pd.concat([at(leads(*ALL[1:], *HEADS, ODD[0], ours=ours), 1, 64) for ours in OURS])
    printed = pd.concat([paper.table(4), paper.table(5)]).set_index(["method", "b"]).h200
    largest = {ours: at(leads(PAPER, ours=ours), 256, 256).unstack("provider") for ours in OURS}
    one_pass = pd.concat([leads(*ALL, ours=HOPPER)]).xs(ONE_PASS, level="provider")
    store = {D: _overhead(D) for D in STEMS}
    beyond = (store[4096].measured_pct - store[4096].predicted_pct).round(1)
    extra = results("profile-20261121").query("b == 256").set_index("provider")
    extra = extra.peak_extra_bytes / 1e6
    stored = extra.drop([*OURS, MATMUL])
    ideal = pd.read_csv(H200 / "tp-20261122" / f"scaling_{STEMS[8192]}.csv")
    ideal = ideal[ideal.provider == HOPPER]
    saved = engines.saved(engines.MODEL, "plain")
    token, group = _share(LEAN, "flash_sampling_token"), _share(PAPER, PORTABLE)
    rows = [
        [
            "For B <= 64 FlashSampling is faster than all baselines",
            said("**holds**: ", min(small.min(), lean.min()) > 1)
            + f"{span(small)} times as fast as FI2, FI1 and compiled multinomial, "
            f"{span(lean)} times as fast as every leaner form that we could build, on all LM heads",
        ],
        [
            "The advantage narrows at large batch sizes",
            said("**not of necessity**: ", largest[HOPPER][FI2].min() > 1)
            + f"at B = 256 the paper has {span(printed['FI2', 256])} of "
            f"FI2's speed, our portable kernel {span(largest[PORTABLE][FI2])}, the one for Hopper "
            f"{span(largest[HOPPER][FI2])}. "
            "[Between the powers of two](#between-the-powers-of-two) it does",
        ],
        [
            "The gain is primarily from fusion",
            said("**does not hold**: ", one_pass.max() < 1.2)
            + "a sampler that stores the logits and reads them once takes "
            f"{span(one_pass)} times as long as the Hopper kernel on the paper's two LM heads; the "
            "rest of the gain is slow sampling kernels",
        ],
        [
            "Sampling takes 2 to 6 % of the kernel's time (Table 1, Figure 4)",
            said("**only up to B = 64** ", float(token[2]) < 6 < float(token[3]))
            + "with a Gumbel for every token, as in the paper: "
            f"{listed(token)} % at B = 1, 16, 64 and 256. With [one for 32 tokens](noise.md) "
            f"{listed(group)} % ([below](#table-1-and-figure-4-where-the-time-goes))",
        ],
        [
            "The I/O model is accurate (Table 9)",
            said("**does not hold up to B = 64**: ", beyond.loc[:64].max() > 3)
            + f"storing the logits costs {span(beyond, '.1f')} "
            "points more than 2B/D at D = 4096 ([below](#table-9-storing-the-logits))",
        ],
        [
            "Real speedups exceed the model's, because separate kernels are eliminated",
            "**holds**, in numbers: [the I/O model, and what it leaves out](io-model.md)",
        ],
        [
            "Memory-efficient: no [B, V] logits",
            said("**holds**: ", extra[list(OURS)].max() < 1)
            + f"{span(extra[list(OURS)], '.1f')} MB beyond weight and hidden at B = 256, "
            f"where the others take {span(stored, '.0f')} MB",
        ],
        [
            "FlashSampling under tensor parallelism (Table 6, Figure 3)",
            f"{span(100 * ideal.tp2_ideal, '.0f')} % of ideal scaling on two GPUs and "
            f"{span(100 * ideal.tp4_ideal, '.0f')} % on four, at D = 8192; not measured on eight "
            "([several GPUs](several-gpus.md))",
        ],
        [
            "Time per output token in vLLM (Tables 7 and 8)",
            f"{span(saved, '.1f')} % less with Qwen3-8B and plain requests as the paper's, all "
            "that a sampler could save; more with others ([end to end](end-to-end.md))",
        ],
    ]
    of_cells = places(*ALL, *HEADS, ODD[0], STORE, "profile-20261121", "tp-20261122")
    return with_source(table(["claim", "on an H200"], rows, left=2), *of_cells)


@block
def points_of_fusion() -> str:
    """Of a speedup of 1.46, which hundredths come from where."""
    configuration = _configurations(PAPER, LEAN)[STEMS[4096]]
    rows = []
    for name, label in ((FI2, "FI2"), (ONE_PASS, "the one-pass argmax")):
        of = attribute(configuration, HOPPER, name, MATMUL).loc[64]
        parts = (of.passes, of.matmul, of.predicted - 1, of.gaps)
        rows.append([label, f"{of.measured:.2f}", *(f"{100 * part:.0f}" for part in parts)])
    heads = [
        *("over, at B = 64", "speedup", "points: its sampling kernels", "a faster matmul"),
        *("bytes that the model counts", "gaps between kernels"),
    ]
    return with_source(table(heads, rows), *places(PAPER, LEAN))


def _share(run: str, provider: str) -> list[str]:
    of = results(run).query("d == 4096").set_index(["provider", "b"]).loc[provider]
    whole = of.matmul_us + of.sampling_us + of.other_us
    return [f"{100 * (of.sampling_us / whole)[B]:.1f}" for B in (1, 16, 64, 256)]


@block
def share_of_sampling() -> str:
    printed = paper.table(1).set_index(["method", "b"]).sampling_pct
    split_by = results(PAPER, LEAN).groupby("provider").split_by.first()
    names = {
        "ours, one Gumbel a token, as the paper's": (LEAN, "flash_sampling_token"),
        "ours, portable": (PAPER, PORTABLE),
        "ours, Hopper": (PAPER, HOPPER),
        "FI2": (PAPER, FI2),
        "Multinomial": (PAPER, MULTINOMIAL),
        "matmul + one-pass argmax": (LEAN, ONE_PASS),
    }
    rows = [
        [f"{method}, paper", *(f"{printed[method, B]:.1f}" for B in (1, 16, 64, 256)), "profilers"]
        for method in ("FlashSampling", "FI2", "Multinomial")
    ]
    rows += [
        [label, *_share(run, name), TOLD_APART[split_by[name]]]
        for label, (run, name) in names.items()
    ]
    return with_source(
        table(["", "B = 1", "16", "64", "256", "told apart"], rows), *places(PAPER, LEAN)
    )


def _overhead(D: int) -> pd.DataFrame:
    return logits_store.overhead(_configurations(STORE)[STEMS[D]])


@block
def storing() -> str:
    both = [_overhead(D) for D in STEMS]
    rows = []
    for B in (1, 4, 16, 64, 128, 256):
        cells = [
            text
            for of in both
            for text in (
                *(f"{of[f'{what}_pct'][B]:.2f}" for what in ("predicted", "measured")),
                f"{of.paper_pct[B]:.1f}",
            )
        ]
        rows.append([B, *cells])
    heads = ["B", *(name for D in STEMS for name in (f"2B/D, D = {D}", "ours", "paper, B200"))]
    return with_source(table(heads, rows, left=0), *places(STORE))


@block
def methods() -> str:
    """Which sampler of ours stands for which method of the paper."""
    facts = paper.source()
    own = facts["fused"]
    rows = [[own["method"], f"`{own['provider']}`, or what `--fused` names", own["note"]]]
    rows += [
        [method, f"`{entry['provider']}`", entry["note"]]
        for method, entry in facts["baselines"].items()
    ]
    return table(["method in the paper", "sampler of ours", "alike?"], rows, left=3)


@block
def compared_with_the_paper() -> str:
    found = beside_paper.compare(
        list(_configurations(PAPER).values()), "h200", paper.source()["fused"]["provider"]
    )
    cells = pd.concat([cells for _, cells in found])
    verdicts = [str(beside_paper.verdict(ratio, beside_paper.WITHIN)) for ratio in cells.ratio]
    of = cells.set_index("b").ratio
    rows = [
        [name, f"{len(some)}", span(some)]
        for name, some in (
            ("B up to 32", of[of.index <= 32]),
            ("B = 64", of[of.index == 64]),
            ("B = 128 and 256", of[of.index >= 128]),
        )
    ]
    counts = listed(f"{verdicts.count(word)} `{word}`" for word in ("agrees", "better", "worse"))
    text = table(["", "cells", "ours / paper"], rows)
    return with_source(f"{text}\n\nVerdicts: {counts}.", *places(PAPER))


@block
def two_runs() -> str:
    """How far two runs of one commit differ."""
    one, other = (read_csv([H200 / name]) for name in (PAPER, LEAN))
    cells = runs.pairs(one, other)
    furthest = max(cells["hi"].max() - 1, 1 - cells["lo"].min())
    return (
        f"The two runs above are of one commit and one machine, and differ by up to "
        f"{100 * furthest:.1f} %, interval included."
    )


LABELS = {
    FI2: "FI2",
    FI1: "FI1",
    MULTINOMIAL: "multinomial, compiled",
    RACE: "exponential race (vLLM)",
    FI2_LEAN: "FI2, lean",
    "flashinfer_top_k_top_p_lean": "FI1, lean",
    ONE_PASS: "matmul + one-pass argmax",
}


@block
def parts_of_speedups() -> str:
    configuration = _configurations(*ALL[:3])[STEMS[4096]]
    rows = []
    for name in (FI2, FI2_LEAN, ONE_PASS):
        found = attribute(configuration, HOPPER, name, MATMUL)
        for B in (1, 64, 256):
            of = found.loc[B]
            parts = (f"{part:+.3f}" for part in (of.gaps, of.passes, of.matmul))
            cells = [f"{of.predicted:.3f}", f"{of.measured:.3f}", *parts, f"{of.bound:.3f}"]
            rows.append([f"over {LABELS[name]}", B, *cells])
    heads = ["", "B", "model", "measured", "gaps", "passes", "matmul", "if sampling were free"]
    return with_source(table(heads, rows), *places(*ALL[:2]))


@block
def two_terms_more() -> str:
    rows = []
    both = _configurations(*ALL[:3])
    for name, label in LABELS.items():
        for D, stem in STEMS.items():
            of = extend(both[stem], name, MATMUL, STREAM)
            assert of is not None and of.gaps_us is not None
            times = (f"{of.fixed_us:.1f}", f"{of.gaps_us:.1f}", f"{of.passes:.1f}")
            tried = ", ".join(map(str, of.held_out))
            rows.append([label, D, of.kernels, *times, f"{100 * of.worst:.1f} %", tried])
    heads = [
        *("sampler", "D", "kernels", "fixed, us", "of it gaps, us", "passes"),
        *("largest error", "tried at B"),
    ]
    return with_source(table(heads, rows), *places(*ALL[:3]))
