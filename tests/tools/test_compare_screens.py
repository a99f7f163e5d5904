"""tools/compare_screens.py on a small head."""

from __future__ import annotations

import csv

import compare_screens
import torch


def test_every_logit_is_within_the_bound_of_the_fp8_copy():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(300, 64, generator=generator).bfloat16()
    weight[7] *= 100
    hidden = torch.randn(5, 64, generator=generator).bfloat16()
    logits, bound = compare_screens.fp8_screen(weight, hidden)
    error = (logits - hidden.double() @ weight.double().T).abs()
    assert (error <= bound).all()
    assert (error > 0.05 * bound).any()  # a bound that is never approached would prove nothing


def test_the_csv_has_both_copies_and_the_fp8_copy_leaves_more(tmp_path):
    path = tmp_path / "bounds.csv"
    compare_screens.main([str(path), "--d", "64", "--v", "500"])
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == compare_screens.COLUMNS and path.with_suffix(".env.json").exists()
    counts = {
        (row["copy"], row["sigma"], row["temperature"]): float(row["candidates"]) for row in rows
    }
    assert len(counts) == len(rows) == 4 * len(compare_screens.SIGMAS)
    for (_, sigma, temperature), number in counts.items():
        assert (
            1 <= counts["int8", sigma, temperature] <= number <= counts["fp8", sigma, temperature]
        )
        assert counts["int8", sigma, temperature] < counts["fp8", sigma, temperature]
