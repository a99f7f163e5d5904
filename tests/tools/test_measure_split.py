"""The tool that times whole and split blocks, on a CPU and a small head, and its table."""

from __future__ import annotations

import measure_split
from measure_split import COLUMNS, table

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


def test_the_tiles_are_the_shipped_ones():
    assert HopperConfig(*measure_split.TILES) == find("hopper", 1, 4096, "NVIDIA H200", (9, 0))
