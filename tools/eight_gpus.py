"""The time on eight GPUs as a model has it, from what was measured on one, two and four; a table.

    python tools/eight_gpus.py results/h200/tp-20261122 results/h200/shards-20261122

T(n) is the time of a step on n GPUs, S(n) that of one rank's part of the vocabulary on a GPU alone
(the largest part: a multiple of 256 tokens). What is left is what the ranks cost each other, and
the time until they are aligned: x(n) = T(n) - S(n). Whatever x grew by from two GPUs to four, it is
supposed to grow by again:

    T(8) = S(8) + x(4) + max(0, x(4) - x(2))

In the same way T(4) follows from one and two GPUs; the table has how far off that is.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pandas as pd

from fsbench.kernels.shard.vocab_shard import even_blocks

MATMUL = "matmul_only"
"""Exchanges nothing, and cuBLAS takes other kernels for shards of other sizes: not modelled."""


def largest_shard(V: int, ranks: int) -> int:
    """Tokens of the largest of `ranks` shards."""
    bounds = even_blocks(V, ranks)
    return max(end - begin for begin, end in pairwise(bounds))


def predicted(whole: dict[int, float], shard: dict[int, float], ranks: int) -> float:
    """T(ranks) from T and S, by number of GPUs, at half and a quarter of them, and S(ranks)."""
    half, quarter = (whole[n] - shard[n] for n in (ranks // 2, ranks // 4))
    return shard[ranks] + half + max(0.0, half - quarter)


def table(over_ranks: Path, shards: Path) -> pd.DataFrame:
    """By D, provider and B, in us: T(n) and x(n) of 1, 2 and 4, S(8), T(8) and T(4) as predicted.

    Of medians. tp8_ideal: T(1) / (8 T(8)).
    """
    rows = []
    times = pd.read_csv(over_ranks / "results.csv").set_index(["d", "provider", "b", "tp"])
    for D, V in sorted({(row.d, row.v) for row in times.reset_index().itertuples()}):
        alone = {
            n: pd.read_csv(shards / f"d{D}_v{largest_shard(V, n)}" / "results.csv")
            .set_index(["provider", "b"])
            .median_us
            for n in (1, 2, 4, 8)
        }
        for name, B in alone[8].drop(MATMUL, level="provider").index:
            T = {n: times.median_us[D, name, B, n] for n in (1, 2, 4)}
            S = {n: alone[n][name, B] for n in alone}
            tp8 = predicted(T, S, 8)
            rows.append(
                {
                    **{"d": D, "provider": name, "b": B},
                    **{f"tp{n}_us": T[n] for n in T},
                    **{f"x{n}_us": T[n] - S[n] for n in T},
                    "tp4_predicted_us": predicted(T, S, 4),
                    "shard8_us": S[8],
                    "tp8_predicted_us": tp8,
                    "tp8_ideal": T[1] / (8 * tp8),
                }
            )
    return pd.DataFrame(rows)


def markdown(found: pd.DataFrame) -> str:
    """The table of docs/several-gpus.md."""
    lines = [
        "| D | sampler | B | T(1) | T(2) | T(4) | T(4) by the model | S(8) | T(8) by the model "
        "| ideal |",
        "|---:|:---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found.itertuples():
        times = (row.tp1_us, row.tp2_us, row.tp4_us, row.tp4_predicted_us, row.shard8_us)
        cells = [row.d, f"`{row.provider}`", row.b, *(f"{us:.0f}" for us in times)]
        cells += [f"{row.tp8_predicted_us:.0f}", f"{100 * row.tp8_ideal:.0f} %"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(table(Path(sys.argv[1]), Path(sys.argv[2]))))
