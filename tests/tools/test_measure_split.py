"""The tool that times whole and split blocks, on a CPU and a small head, and its table."""

from __future__ import annotations

import json

import measure_split
import measuring
from measure_split import COLUMNS, SHAPES, table
from pages import blocks, split

from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.tables import find


def test_every_way_is_a_row(monkeypatch):
    monkeypatch.setattr(measure_split, "DEVICE", "cpu")
    monkeypatch.setattr(measure_split, "SHAPES", ((64, 300),))
    monkeypatch.setattr(measure_split, "BATCHES", (1, 3))
    monkeypatch.setattr(measure_split, "ROUNDS", 2)
    monkeypatch.setattr(measure_split, "ITERATIONS", 1)
    lines = [dict(zip(COLUMNS, line, strict=True)) for line in table()]
    assert [(line["b"], line["what"]) for line in lines] == [
        (1, "portable"), (1, "matmul"), (3, "portable"), (3, "matmul")
    ]  # fmt: skip
    assert all(float(line["time_us"]) > 0 for line in lines)


def test_the_page_has_in_bold_what_is_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(blocks, "RESULTS", tmp_path)
    monkeypatch.setattr(split, "H200", tmp_path / "h200")
    times = {"portable": 3, "hopper": 2, "split": 1, "matmul": 4, "stream": 0.5}
    rows = [[D, V, 1, what, us] for D, V in SHAPES for what, us in times.items()]
    path = tmp_path / "h200" / split.RECORD
    measuring.write(path, COLUMNS, rows, "cpu")
    assert json.loads(path.with_suffix(".env.json").read_text())
    text = split.split_heads()
    lines = {tuple(line.split(" | ")[:2]): line for line in text.splitlines() if "3.0" in line}
    assert len(lines) == len(SHAPES)
    assert "| 4096 | 18992 | 1.13 | 121 | 0.5 | 3.0 / 2.0 / **1.0** |" in text
    assert "| 3072 | 49216 | 2.92 | 9 | 0.5 | 3.0 / 2.0 / 1.0 |" in text
    assert "| 8192 | 16032 | 0.95 | 13 | 0.5 | 3.0 / 2.0 / 1.0 |" in text


def test_the_tiles_are_the_shipped_ones():
    assert HopperConfig(*measure_split.TILES) == find("hopper", 1, 4096, "NVIDIA H200", (9, 0))
