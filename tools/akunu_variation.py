"""What the approximations of akunu's sampler cost: total variation from the law that it states.

python tools/akunu_variation.py results/truncated/akunu_variation.csv

For rows of V = 151,936 logits of several laws and several settings of the filters, the probability
of every token by the chapter's arithmetic (kernels/providing/akunu_reference.py) against the same
filters in exact arithmetic (fsbench.reference, in akunu's order), in float64; the mean of 8 rows:

    kept, kept_exact  tokens kept
    tv_fp16           of reading the logits as fp16, with exact filters
    tv_filters        of the bisections, and of cutting the token that crosses p
    tv                of both together
    changed_pct       draws whose winner is another because scores have 11 bits, of DRAWS
"""

from __future__ import annotations

import sys
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from fsbench import reference
from fsbench.kernels.providing import akunu_reference as akunu
from fsbench.kernels.providing.filters import AKUNU_ORDER

V, ROWS, DRAWS = 151_936, 8, 4_000
MOST_KEPT = 2_000  # of a row whose scores are simulated
SETTINGS: tuple[dict[str, Any], ...] = (
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 40},
    {"top_k": 1000},
    {"top_p": 0.9},
    {"top_p": 0.5},
    {"min_p": 0.05},
    {},
)


def laws() -> dict[str, Tensor]:
    """Rows of logits [ROWS, V] by name."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(ROWS, V, generator=generator)
    order = torch.argsort(torch.rand(ROWS, V, generator=generator), dim=1)
    zipf = -torch.log(torch.arange(1, V + 1).float())
    peaked = torch.zeros(V).index_fill(0, torch.tensor([0]), 12.0)
    return {
        "normal:1": noise,
        "normal:3": 3 * noise,
        "zipf:1.1": (1.1 * zipf)[order] + 0.1 * noise,
        "peaked:12": peaked[order] + 0.1 * noise,
    }


def law_of(logits: Tensor, keep: Tensor) -> Tensor:
    """softmax over the kept tokens, float64."""
    return torch.softmax(logits.double().masked_fill(~keep, -torch.inf), 1)


def variation(p: Tensor, q: Tensor) -> float:
    """Mean total variation distance of the rows."""
    return float(0.5 * (p - q).abs().sum(1).mean())


def changed(logits: Tensor, keep: Tensor) -> float | None:
    """Per cent of draws that fp16 scores decide otherwise than exact ones, of the first row."""
    tokens = keep[0].nonzero()[:, 0]
    if len(tokens) > MOST_KEPT:
        return None
    u = torch.rand(
        DRAWS, len(tokens), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    rounded = akunu.scores(logits[0, tokens].expand_as(u), u, 1.0).argmax(1)
    exact = (
        logits[0, tokens].half().double() - torch.log(-torch.log(u.clamp(1e-7, 1 - 1e-7)))
    ).argmax(1)
    return 100.0 * float((rounded != exact).double().mean())


def main(path: str) -> None:
    rows = []
    for name, logits in laws().items():
        for filters in SETTINGS:
            exact = reference.truncate(logits, **filters, order=AKUNU_ORDER).kept
            of_half = reference.truncate(logits.half(), **filters, order=AKUNU_ORDER).kept
            keep = akunu.kept(logits, **filters)
            law, half_law = law_of(logits, exact), law_of(logits.half(), of_half)
            own = law_of(logits.half(), keep)
            rows.append(
                {
                    "logits": name,
                    "top_k": filters.get("top_k", 0),
                    "top_p": filters.get("top_p", 1.0),
                    "min_p": filters.get("min_p", 0.0),
                    "kept_exact": float(exact.sum(1).double().mean()),
                    "kept": float(keep.sum(1).double().mean()),
                    "tv_fp16": variation(law, half_law),
                    "tv_filters": variation(half_law, own),
                    "tv": variation(law, own),
                    "changed_pct": changed(logits, keep),
                }
            )
            print(rows[-1], flush=True)
    pd.DataFrame(rows).to_csv(path, index=False, float_format="%.4g")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1])
