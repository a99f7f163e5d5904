"""tools/measure_equal_tokens.py on a small head, with equal tokens and with one that differs."""

from __future__ import annotations

import csv

import measure_equal_tokens


def measured(path) -> list[dict[str, str]]:
    size = ["--d", "64", "--v", "700", "--draws", "65", "--device", "cpu"]
    measure_equal_tokens.main([str(path), *size])
    assert path.with_suffix(".env.json").exists()
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_has_the_counts_of_each_temperature(tmp_path):
    rows = measured(tmp_path / "equal.csv")
    assert tuple(rows[0]) == measure_equal_tokens.COLUMNS
    assert [float(row["temperature"]) for row in rows] == [*measure_equal_tokens.TEMPERATURES]
    assert {row["draws"] for row in rows} == {"128"} and {row["unequal"] for row in rows} == {"0"}


def test_tokens_that_differ_and_rows_that_are_computed_in_full_are_counted(tmp_path, monkeypatch):
    screened_sample = measure_equal_tokens.screened_sample

    def wrong(*arguments, **options):
        sample = screened_sample(*arguments, **options)
        tokens, computed = sample.tokens.clone(), sample.found.clone()
        tokens[3] += 1
        computed[:2] = -1
        return sample._replace(tokens=tokens, found=computed)

    monkeypatch.setattr(measure_equal_tokens, "screened_sample", wrong)
    rows = measured(tmp_path / "equal.csv")
    assert all((row["unequal"], int(row["in_full"]) >= 4) == ("2", True) for row in rows)
