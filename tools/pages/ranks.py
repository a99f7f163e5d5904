"""Several GPUs: docs/several-gpus.md, and the time on eight as a model has it.

T(n) is the time of a step on n GPUs, S(n) that of one rank's part of the vocabulary on a GPU alone
(the largest part: a multiple of 256 tokens). What is left, x(n) = T(n) - S(n), is what the ranks
cost each other. Whatever x grew by from two GPUs to four, it is supposed to grow by again:

    T(8) = S(8) + x(4) + max(0, x(4) - x(2))

In the same way T(4) follows from one and two GPUs; the table has how far off that is.
"""

from __future__ import annotations

from itertools import pairwise

import pandas as pd

from fsbench.kernels.shard.vocab_shard import even_blocks
from pages.blocks import (
    FI1,
    FI2,
    H200,
    HOPPER,
    LARGE,
    MATMUL,
    ONE_PASS,
    PORTABLE,
    RESULTS,
    STEMS,
    block,
    bullets,
    places,
    said,
    span,
    table,
    with_source,
)

RUN, SHARDS = "tp-20261122", "shards-20261122"
SAMPLERS = (
    *(HOPPER, PORTABLE, "flash_sampling_two_step", "flash_sampling_all_reduce"),
    *("flash_sampling_gather", ONE_PASS, FI2, FI1, "multinomial_compiled", MATMUL),
)


def _scaling(D: int) -> pd.DataFrame:
    return pd.read_csv(H200 / RUN / f"scaling_{STEMS[D]}.csv").set_index(["provider", "b"])


@block
def over_ranks() -> str:
    """Median times on one, two and four GPUs, D = 8192."""
    of = _scaling(LARGE[0])
    rows = []
    for name in SAMPLERS:
        cells = [f"`{name}`"]
        for B in (16, 64, 256):
            cells += [f"{of[f'tp{n}_median_us'][name, B]:.0f}" for n in (1, 2, 4)]
            cells.append(f"{100 * of.tp4_ideal[name, B]:.0f} %")
        rows.append(cells)
    heads = ["sampler"]
    for B in (16, 64, 256):
        heads += [f"B = {B}: 1 GPU", "2", "4", "ideal"]
    return with_source(table(heads, rows), *places(RUN))


@block
def screened_over_ranks() -> str:
    """Of the screened head and the fused kernel on one and two GPUs, D = 8192."""
    record = "h100/screened-tp-20261125"
    of = pd.read_csv(RESULTS / record / "scaling_h100_d8192_v128256.csv")
    rows = []
    for B, found in of.set_index("provider").groupby("b"):
        cells: list[object] = [B]
        for name in ("flash_sampling_screened", PORTABLE, MATMUL):
            one, two = (f"{found[f'tp{n}_median_us'][name]:.0f}" for n in (1, 2))
            cells += [one, two, f"{100 * found.tp2_ideal[name]:.0f} %"]
        rows.append(cells)
    heads = ["B"]
    for name in ("`flash_sampling_screened`", "`flash_sampling`", "matmul"):
        heads += [f"{name}, 1 GPU", "2", "ideal"]
    return with_source(table(heads, rows, left=0), record)


@block
def over_ranks_findings() -> str:
    lines = []
    for D in STEMS:
        of = _scaling(D).loc[HOPPER]
        shares = [f"{span(100 * of[f'tp{n}_ideal'], '.0f')} %" for n in (2, 4)]
        times = span(of.tp4_median_us, ".0f")
        lines.append(
            f"D = {D}: the fused kernel reaches {shares[0]} of ideal scaling on two GPUs and "
            f"{shares[1]} on four, where a step takes {times} us."
        )
    of = _scaling(LARGE[0])
    for n in (2, 4):
        median = of[f"tp{n}_median_us"].unstack("b")
        ours, two_step = median.loc[HOPPER], median.loc["flash_sampling_two_step"]
        nccl = median.loc[["flash_sampling_all_reduce", "flash_sampling_gather"]] - two_step
        lines.append(
            f"{n} GPUs, D = 8192: the fused kernel with its exchange takes "
            f"{span(ours / median.loc[MATMUL])} of the time of the local matmul alone. The "
            f"exchange inside the kernel gains {(two_step - ours).max():.1f} us at most over a "
            f"second kernel; both gain {span(nccl.stack(), '.0f')} us over NCCL. The "
            f"one-pass argmax takes {span(median.loc[ONE_PASS] / ours)} times as long, FI2, which "
            f"gathers logits, {span(median.loc[FI2] / ours)} times."
        )
    return with_source(bullets(*lines), *places(RUN))


def largest_shard(V: int, ranks: int) -> int:
    """Tokens of the largest of `ranks` shards."""
    return max(end - begin for begin, end in pairwise(even_blocks(V, ranks)))


def predicted(whole: dict[int, float], shard: dict[int, float], ranks: int) -> float:
    """T(ranks) from T and S, by number of GPUs, at half and a quarter of them, and S(ranks)."""
    half, quarter = (whole[n] - shard[n] for n in (ranks // 2, ranks // 4))
    return shard[ranks] + half + max(0.0, half - quarter)


def _times(path: str) -> pd.DataFrame:
    return pd.read_csv(H200 / path / "results.csv")


@block
def eight_gpus() -> str:
    times = _times(RUN).set_index(["d", "provider", "b", "tp"]).median_us
    rows, faster = [], []
    shapes = _times(RUN)[["d", "v"]].drop_duplicates().sort_values("d")
    for D, V in shapes.values.tolist():
        alone = {
            n: _times(f"{SHARDS}/d{D}_v{largest_shard(V, n)}")
            .set_index(["provider", "b"])
            .median_us
            for n in (1, 2, 4, 8)
        }
        # cuBLAS takes other kernels for shards of other sizes: not modelled.
        for name, B in alone[8].drop(MATMUL, level="provider").index:
            T = {n: times[D, name, B, n] for n in (1, 2, 4)}
            S = {n: alone[n][name, B] for n in alone}
            eight = predicted(T, S, 8)
            us = [*T.values(), predicted(T, S, 4), S[8], eight]
            faster.append(eight < T[4])
            cells = [f"{value:.0f}" for value in us]
            rows.append([D, f"`{name}`", B, *cells, f"{100 * T[1] / (8 * eight):.0f} %"])
    heads = [
        *("D", "sampler", "B", "T(1)", "T(2)", "T(4)", "T(4) by the model", "S(8)"),
        *("T(8) by the model", "ideal"),
    ]
    records = places(
        RUN, *(f"{SHARDS}/d{D}_v{largest_shard(V, 8)}" for D, V in shapes.values.tolist())
    )
    told = said("By the model, eight GPUs are faster than four in every row.", all(faster))
    return with_source(f"{table(heads, rows, left=2)}\n\n{told}", *records)
