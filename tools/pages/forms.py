"""Every form of the noise in both samplers: docs/noise.md."""

from __future__ import annotations

import pandas as pd

from pages.blocks import H200, block, table, with_source

RECORD = "noise-forms/noise.csv"
NAMES = {"token": "a token", "group4": "4", "group8": "8", "group16": "16", "group": "32"}
"""A form of the noise -> tokens that have one Gumbel together."""


@block
def noise_forms() -> str:
    """Times over the matmul alone by the size of the groups, and how many rows are read for it."""
    found = pd.read_csv(H200 / RECORD)
    unequal, draws = (int(found[name].sum()) for name in ("unequal", "draws"))
    found = found[found.sampler != "matmul"].set_index(["sampler", "noise", "b"])
    ratio, read = found.ratio_to_matmul, found.candidates["screened_sample"]
    batches = {each: ratio[each].index.unique("b") for each in ("flash_sample", "screened_sample")}
    rows = [
        [
            tokens,
            *(f"{ratio[sampler, noise, B]:.2f}" for sampler in batches for B in batches[sampler]),
            f"{read[noise].max():,.0f}",
        ]
        for noise, tokens in NAMES.items()
    ]
    heads = ["one Gumbel for"]
    for sampler, sizes in batches.items():
        first, *others = sizes
        heads += [f"`{sampler}`, B = {first}", *map(str, others)]
    told = (
        f"{unequal} of {draws:,} tokens of `screened_sample` differ from those of `flash_sample` "
        "with the same noise."
    )
    made = table([*heads, "rows of the weight read for a row, at most"], rows)
    return with_source(f"{made}\n\n{told}", f"h200/{RECORD}")
