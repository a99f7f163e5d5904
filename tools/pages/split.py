"""Heads with whole blocks of tokens and with split ones: docs/kernel.md."""

from __future__ import annotations

import pandas as pd

from fsbench.kernels.configs.choice import WORTH_SPLITTING
from fsbench.kernels.configs.hopper import BLOCK_TOKENS
from pages.blocks import H200, block, table, with_source

RECORD = "split/split.csv"
MULTIPROCESSORS = 132
"""Of an H200."""


@block
def split_heads() -> str:
    """Times of each head, in the order of what the last round of whole blocks leaves room for."""
    us = pd.read_csv(H200 / RECORD).set_index(["d", "v", "b", "what"]).time_us.unstack("what")
    batches = us.index.unique("b")
    rows = []
    for D, V in us.index.droplevel("b").unique():
        blocks = -(-V // BLOCK_TOKENS)
        room = -blocks % MULTIPROCESSORS * BLOCK_TOKENS * D * 2
        splits = blocks > MULTIPROCESSORS and room >= WORTH_SPLITTING
        of = us.loc[D, V]
        cells = []
        for B in batches:
            times = [f"{x:.1f}" for x in (of.portable[B], of.hopper[B], of.split[B])]
            if splits:
                times[2] = f"**{times[2]}**"
            cells.append(" / ".join(times))
        fill = f"{blocks / MULTIPROCESSORS:.2f}"
        rows.append([room, D, V, fill, f"{room / 1e6:.0f}", f"{of.stream.median():.1f}", *cells])
    rows.sort(reverse=True)
    heads = ["D", "V", "rounds", "room, MB", "read once", *(f"B = {B}" for B in batches)]
    return with_source(table(heads, (row[1:] for row in rows), left=0), f"h200/{RECORD}")
