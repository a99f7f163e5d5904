"""The table of quantised heads, from runs of the harness as from the older tool's record."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from pages import blocks, heads

US = {
    ("fp8", "flash_sampling"): 70.0,
    ("fp8", "flash_sampling_hopper"): 90.0,
    ("fp8", "scaled_matmul"): 80.0,
    ("fp8", "matmul_only"): 100.0,
    ("int8", "flash_sampling"): 240.0,
    ("int8", "flash_sampling_hopper"): 230.0,
    ("int8", "scaled_matmul"): 110.0,
    ("int8", "matmul_only"): 200.0,
}


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record of both forms: a function that says how many of 500 fp8 tokens are others."""
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    monkeypatch.setattr(heads, "H200", tmp_path / "h200")
    monkeypatch.setattr(heads, "with_source", lambda text, *records: f"{text} {records}")
    for form in ("int8", "fp8"):
        folder = tmp_path / "h200" / f"quantised-{form}-20990101"
        folder.mkdir(parents=True)
        cell = {"d": 4096, "b": 1, "status": "ok", "weights": form}
        rows = [
            {**cell, "provider": provider, "median_us": us}
            for (of, provider), us in US.items()
            if of == form
        ]
        pd.DataFrame(rows).to_csv(folder / "results.csv")
    blocks.results.cache_clear()

    def told(passed: bool, others: float | None):
        (tmp_path / "h200" / "verify").mkdir()
        line = {"name": "quantised", "passed": passed, "draws": 500, "statistic": others}
        lines = [json.dumps(each) for each in ({"schema": 2}, line)]
        (tmp_path / "h200" / "verify" / "quantised-fp8.jsonl").write_text("\n".join(lines))

    yield told
    blocks.results.cache_clear()


def test_a_form_is_compared_with_the_matmul_of_its_own_run(record):
    record(True, 0.0)
    text = heads.quantised_times()
    assert "| 4096 | 1 | 100 | 0.70 | 1.20 | 0.90 | 0.80 | 0.55 |" in text
    assert "All of 500 draws are those of a bf16 weight" in text
    assert "('h200/quantised-fp8-20990101', 'h200/quantised-int8-20990101')" in text


@pytest.mark.parametrize(("passed", "others"), [(True, 3.0), (False, None)])
def test_other_tokens_need_other_words(record, passed, others):
    record(passed, others)
    with pytest.raises(ValueError, match="the records do not say"):
        heads.quantised_times()
