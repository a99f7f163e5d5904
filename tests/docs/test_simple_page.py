"""docs/simple.md is true: its tables and numbers are those of the committed results."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import simple_tables
from tree import H200, ROOT

from fsbench.records.store import read_environment
from fsbench.simple.hot import Coverage
from fsbench.simple.sizing import Cost, best

RUN = ROOT / "results" / "cpu" / "simple-20261121"
HOST = H200 / "simple-20261121"
PAGE = (ROOT / "docs" / "simple.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", simple_tables.TABLES)
def test_tables_are_the_measured_ones(name):
    assert simple_tables.TABLES[name](RUN) in PAGE


@pytest.mark.parametrize("name", simple_tables.HOST_TABLES)
def test_tables_of_the_host_are_the_measured_ones(name):
    assert simple_tables.HOST_TABLES[name](HOST) in PAGE


def test_sentences_about_the_host():
    steps = pd.read_csv(HOST / "steps.csv").set_index(["controls", "design"])
    whole, hot = steps.loc["plain", "offloaded"], steps.loc["plain", "SHVS"]
    assert f"{whole.rows_per_s:,.0f} whole rows per second, and {hot.rows_per_s:,.0f}" in PAGE
    assert f"hot tokens ({hot.times_offloaded:.1f} times)" in PAGE
    seen = pd.read_csv(HOST / "penalties.csv").set_index("seen")
    assert f"seen tokens cost {seen.ratio[4096]:.2f} times none" in PAGE
    assert f"kept {read_environment(HOST)['others_cores']:.2f} cores busy" in PAGE
    bus = pd.read_csv(HOST / "copies.csv").set_index(["what", "b"]).time_us["whole rows"]
    assert f"{bus[1]:.0f} us for the bus at B = 1, {bus[256] / 1e3:.1f} ms at B = 256" in PAGE
    table = simple_tables.exposed(HOST).splitlines()[2:]
    for line in table:
        cells = [float(cell.replace(",", "")) for cell in line.strip("|").split("|")]
        _, serial, overlapped, shvs, shvs_overlapped, fused, one_pass, gumbel, race = cells
        assert min(serial, shvs) > max(one_pass, gumbel, race)  # one batch
        assert fused < one_pass < overlapped < gumbel < race  # two batches
        assert overlapped < shvs_overlapped


def test_the_measured_best_is_within_one_step_of_the_grid_of_the_models():
    facts, scans = json.loads((RUN / "fit.json").read_text()), pd.read_csv(RUN / "scans.csv")
    cover = Coverage(facts["v"], *(np.array(facts[name]) for name in ("sizes", "mean", "low")))
    found = best(cover, Cost(**facts["cost"]), both=True)
    measured = int(scans.row_us.idxmin())
    around = scans.h[max(0, measured - 1) : measured + 2]
    assert around.iloc[0] <= found.H <= around.iloc[-1]
    assert found.root == pytest.approx(found.H, abs=1)


def test_sentences_about_the_results():
    steps = pd.read_csv(RUN / "steps.csv").set_index(["controls", "design"])
    whole, hot = steps.loc["plain", "offloaded"], steps.loc["plain", "SHVS"]
    assert f"{whole.row_us:.0f} us whole and {hot.row_us:.1f} us by its hot tokens" in PAGE
    assert f"honest full pass ({hot.times_offloaded:.1f} times, above)" in PAGE
    filtered = steps.loc["production", "SHVS"]
    assert f"({filtered.times_offloaded:.2f} times the full pass)" in PAGE
    assert f"which holds for {100 * filtered.settled:.0f} % of the rows" in PAGE
    assert f"settle {100 * hot.settled:.0f} % without filters" in PAGE
    cost = json.loads((RUN / "fit.json").read_text())["cost"]
    assert f"c = {1e3 * cost['c_us']:.3f} ns per token" in PAGE
    assert f"{10.6 / (1e3 * cost['c_us']):.0f} times less than the paper's 10.6" in PAGE
    assert f"decides {whole.rows_per_s:,.0f} whole rows per second" in PAGE
    assert f"kept {read_environment(RUN)['others_cores']:.2f} cores busy" in PAGE


def test_the_bound_on_the_distance():
    last = pd.read_csv(RUN / "variation.csv").groupby("controls").last()
    assert f"at most {100 * last.mean_distance['plain']:.3f} %" in PAGE
    assert f"(below {100 * last.mean_distance_below['plain']:.3f} % at 95 %)" in PAGE
    assert last.mean_distance["production"] == 0


def test_the_battery_was_passed():
    lines = [json.loads(line) for line in (RUN / "verify.jsonl").read_text().splitlines()]
    verdicts = {(line["provider"], line["verdict"]) for line in lines if "verdict" in line}
    names = {path.stem for path in (ROOT / "baselines").glob("simple_*.py")}
    assert verdicts == {(name, "ok") for name in names}


def test_the_papers_constants():
    """1.06e-8 s per token and 8.55e-6 s, at V = 152,064."""
    assert round(1e6 / (1.06e-2 * 152_064 + 8.55)) == 617 and "617 rows per second" in PAGE


def test_nothing_is_left_to_fill_in():
    assert "<!--" not in PAGE
