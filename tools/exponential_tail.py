"""How torch's exponential random numbers end near 0, where a race is won by rare tokens.

    python tools/exponential_tail.py results/h200/exponential-tail.csv

Columns: `how` (torch: `Tensor.exponential_`; compiled: the same under torch.compile), `value` in
units of 2^-24, `draws` of exactly that value, and `total` draws in all. What follows for a tail of
tokens behind one leader, drawn / exact, is printed: token i wins a race against a leader a gap g
above it if E_i <= e^-g E, so its share is the mean of F(e^-g E) over E ~ Exp(1), over e^-g.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

AT_ONCE = 2**28
BATCHES = 128
UNIT = 2.0**-24
SEEN = 2.0**-17
"""Values above are not counted: there are too many to list, and too few to matter."""


def near_zero(fill: Callable[[Tensor], Tensor]) -> dict[float, int]:
    """Values up to SEEN of BATCHES x AT_ONCE exponentials, and how often each was drawn."""
    numbers = torch.empty(AT_ONCE, device="cuda")
    found: dict[float, int] = {}
    for _ in range(BATCHES):
        drawn = fill(numbers)
        values, counts = drawn[drawn <= SEEN].unique(return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            found[value] = found.get(value, 0) + count
    return dict(sorted(found.items()))


def share_of_tail(found: dict[float, int], total: int, gap: float) -> float:
    """Drawn over exact, for tokens that lie `gap` below a leader."""
    # A value v counts in F(e^-gap E) for every E above v e^gap.
    return sum(
        n / total * math.exp(-value * math.exp(gap)) for value, n in found.items()
    ) * math.exp(gap)


def main(path: Path) -> None:
    compiled = torch.compile(lambda numbers: torch.empty_like(numbers).exponential_())
    rows = []
    for how, fill in (("torch", Tensor.exponential_), ("compiled", compiled)):
        torch.manual_seed(1)
        found, total = near_zero(fill), AT_ONCE * BATCHES
        rows += [[how, value / UNIT, count, total] for value, count in found.items()]
        for gap in (14, 16, 18, 20):
            print(f"{how}, gap {gap}: {share_of_tail(found, total, gap):.4f} of exact")
        for power in range(-23, -16):
            below = sum(n for value, n in found.items() if value <= 2.0**power)
            print(f"{how}, P(E <= 2^{power}): {below / total / 2.0**power:.4f} of exact")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["how", "value", "draws", "total"])
        writer.writerows(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
