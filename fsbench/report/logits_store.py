"""Cost of storing the logits (the paper's Table 9), compared with the I/O model.

The fused kernel is compared with the same kernel that also stores fp32 logits. The model (section
3.3) counts bytes: 4 B V in addition to 2 V D of the weight, so 2 B / D for 2-byte weights.
"""

from __future__ import annotations

import pandas as pd

from fsbench import paper
from fsbench.paper import tables
from fsbench.problem import DTYPES
from fsbench.records.sheet import as_csv
from fsbench.report.tables import Configuration

FP32_BYTES = 4


def pair() -> tuple[str, str]:
    """Return the names of the fused sampler and of the fused sampler that stores its logits."""
    source = paper.source()
    return source["fused"]["provider"], source["stored"]["provider"]


def predicted(B: int, D: int, dtype: str) -> float:
    """Return bytes of the fp32 logits / bytes of the weight: 2 B / D for bf16 and fp16."""
    return FP32_BYTES * B / (DTYPES[dtype] * D)


def overhead(configuration: Configuration) -> pd.DataFrame:
    """Return the time that the store adds, in percent of the fused kernel's time, by B.

    Returns:
        Columns predicted_pct; measured_pct and its interval lo_pct, hi_pct, from two medians of
        one run; paper_pct, published for this shape on a B200, else NaN. Empty if no run has both
        samplers.
    """
    fused, stored = pair()
    ratio = configuration.ratio(stored, fused)
    first = configuration.rows.iloc[0]
    published = tables.table(9)
    same = published[(published["d"] == first.d) & (published["v"] == first.v)].set_index("b")
    return pd.DataFrame(
        {
            "predicted_pct": [100 * predicted(B, first.d, first["dtype"]) for B in ratio.index],
            "measured_pct": 100 * (ratio["value"] - 1),
            "lo_pct": 100 * (ratio["lo"] - 1),
            "hi_pct": 100 * (ratio["hi"] - 1),
            "paper_pct": same["measured_pct"].reindex(ratio.index),
        },
        index=ratio.index,
    )


def files(measured: list[Configuration]) -> dict[str, str]:
    """Return the overhead of each configuration with both samplers as CSV, by file name."""
    return {
        f"logits_store_{each.stem}.csv": as_csv(table)
        for each in measured
        if len(table := overhead(each))
    }
