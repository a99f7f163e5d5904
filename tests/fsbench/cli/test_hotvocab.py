"""`fsbench hotvocab` at small sizes: what it writes, prints, reads and refuses."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from tree import ROOT, newest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.errors import InvalidArgument, ResultsError
from fsbench.records.store import read_environment
from fsbench.simple import native
from fsbench.simple.zipf import ZipfText

V = 3000
FIT = ("hotvocab", "fit", "--v", V, "--rows", 8, "--repeats", 5)
NEEDS_CORE = pytest.mark.skipif(bool(native.missing()), reason=str(native.missing()))


def fsbench(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@NEEDS_CORE
@pytest.mark.usefixtures("one_thread")
def test_fit_measures_scans_and_size_reads_them(tmp_path):
    printed = fsbench(*FIT, "--out", tmp_path)
    scans = pd.read_csv(tmp_path / "scans.csv")
    assert scans.h.is_monotonic_increasing and scans.h.iloc[-1] == V
    assert scans.hits.iloc[-1] == pytest.approx(1) and (scans.hits.diff().dropna() >= 0).all()
    assert (scans[["settled_us", "row_us"]] > 0).all(axis=None)
    assert (scans.lo_us <= scans.row_us).all() and (scans.row_us <= scans.hi_us).all()
    assert read_environment(tmp_path)["isa"] in native.ISAS
    printed_again = fsbench("hotvocab", "size", tmp_path)
    assert "F2, hot always scanned" in printed_again and "measured" in printed_again
    assert printed_again in printed
    # The paper's constants: a line is 40 times slower, the best H about the same.
    paper = fsbench("hotvocab", "size", tmp_path, "--c-us", 0.0106, "--c0-us", 8.55)
    assert "c = 10.6000 ns per token" in paper and "measured" not in paper
    with pytest.raises(InvalidArgument, match="--c-us: expected together"):
        fsbench("hotvocab", "size", tmp_path, "--c-us", 1)


@NEEDS_CORE
@pytest.mark.usefixtures("one_thread")
def test_fit_on_a_trace_of_the_users_own(tmp_path):
    np.save(tmp_path / "trace.npy", ZipfText(V, knee=300).trace(range(16), 200))
    fsbench(*FIT, "--trace", tmp_path / "trace.npy", "--out", tmp_path / "fit")
    facts = json.loads((tmp_path / "fit" / "fit.json").read_text())
    assert facts["trace"] == "trace.npy" and facts["mean"][-1] == 1
    assert pd.read_csv(tmp_path / "fit" / "scans.csv").row_us.isna().all()


def test_records_of_earlier_versions_are_read():
    printed = fsbench("hotvocab", "size", ROOT / "results" / "cpu" / "simple-20261121")
    assert "c = 0.3190 ns" in printed or "c = 0.319" in printed
    assert "14,387" in printed and "11,811" in printed


def test_pipeline_with_measured_times():
    run = newest("lean")
    rows = json.loads(
        fsbench(
            *("hotvocab", "pipeline", "--run", run, "--sampler", "mine:5:60:100"),
            *("--stages", 2, "--json"),
        )
    )
    assert {row["in_flight"] for row in rows} == {2, 3, 4}
    own_sampler = [row for row in rows if row["sampler"] == "mine"]
    assert [row["cycle_us"] for row in own_sampler] == pytest.approx([2082.5, 2005, 2005])
    assert own_sampler[0]["enough_in_flight"] == 3
    fused = min(rows, key=lambda row: row["on_stage_us"])
    assert fused["on_stage_us"] < 0 and fused["times_fastest"] == pytest.approx(1)
    assert "tokens/s" in fsbench("hotvocab", "pipeline", "--sampler", "mine:5", "--stages", 2)


def test_pipeline_takes_no_eager_time_beside_replays():
    run = newest("lean")
    rows = json.loads(fsbench("hotvocab", "pipeline", "--run", run, "--batch", 64, "--json"))
    names = {row["sampler"] for row in rows}
    assert "flash_sample" in names and "FlashSampling (authors)" not in names


def test_pipeline_refuses_what_it_cannot_use():
    run = newest("lean")
    for arguments, message in [
        ([], "--sampler: expected at least one"),
        (["--run", run, "--batch", 3], "expected exact samplers"),
    ]:
        with pytest.raises((InvalidArgument, ResultsError), match=message):
            fsbench("hotvocab", "pipeline", *arguments)
