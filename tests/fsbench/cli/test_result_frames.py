"""Which file of a results folder is read."""

from __future__ import annotations

import gzip

import pytest
from cells import cell

from fsbench.cli.result_frames import read_results
from fsbench.records.cell import Round
from fsbench.records.store import PACKED, POINTS, TABLE, Store, read_records
from fsbench.records.summary import export_csv


@pytest.fixture
def run(tmp_path):
    """A run of 10 us whose results.csv says 99."""
    folder = tmp_path / "run"
    store = Store.create(folder, {"gpu": "NVIDIA H200", "device": "cuda"})
    store.append_round(cell(provider="a", label="a"), 0, Round([10.0] * 8))
    store.close()
    export_csv(folder, read_records(folder))
    table = (folder / TABLE).read_text(encoding="utf-8")
    (folder / TABLE).write_text(table.replace(",10,10,10,", ",99,10,10,"), encoding="utf-8")
    return folder


def median(folder):
    return float(read_results([folder]).median_us.iloc[0])


def test_samples_count_while_a_run_may_go_on(run):
    assert median(run) == 10


@pytest.mark.parametrize("packed", [True, False])
def test_the_table_counts_once_samples_are_packed_or_left_out(run, packed):
    samples = (run / POINTS).read_bytes()
    (run / POINTS).unlink()
    if packed:
        (run / PACKED).write_bytes(gzip.compress(samples))
    assert median(run) == 99


def test_packed_samples_count_without_a_table(run):
    (run / PACKED).write_bytes(gzip.compress((run / POINTS).read_bytes()))
    (run / POINTS).unlink()
    (run / TABLE).unlink()
    assert median(run) == 10
