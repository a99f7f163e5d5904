"""A run compared with the paper's tables, from hand-made results rows."""

import pandas as pd
import pytest
from cells import only, results_row

from fsbench import paper
from fsbench.errors import ResultsError
from fsbench.paper import tables
from fsbench.report.against_paper import (
    Agreement,
    agreement,
    cells,
    cells_over_ranks,
    compare,
    spread,
)
from fsbench.report.tables import configurations

FUSED = paper.source()["fused"]["provider"]
BASELINES = {name: entry["provider"] for name, entry in paper.source()["baselines"].items()}


def _row(provider, b, median, **changes):
    return results_row(provider, b, median, **{"label": provider, **changes})


def _as_published(gpu, table=4, factor=1.0, **changes):
    """A run whose speedups are the published ones times a factor."""
    published = tables.speedups(gpu)
    published = published[published["table"] == table]
    rows = [_row(FUSED, b, 100.0, fused=True) for b in published["b"].unique()]
    rows += [
        _row(BASELINES[cell.method], cell.b, 100.0 * cell.paper * factor)
        for cell in published.itertuples()
    ]
    shape = {"d": published["d"].iloc[0], "v": published["v"].iloc[0]}
    return [{**row, **shape, **changes} for row in rows]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (1.051, Agreement.BETTER),
        (1.05, Agreement.AGREES),
        (0.95, Agreement.AGREES),
        (0.949, Agreement.WORSE),
    ],
)
def test_the_verdict_is_about_the_distance_from_the_published_value(ratio, expected):
    assert agreement(ratio, 0.05) == expected


@pytest.mark.parametrize("gpu", paper.GPUS)
@pytest.mark.parametrize("table", [4, 5])
def test_the_published_values_agree_with_themselves_and_no_other_gpu(gpu, table):
    configuration = only(_as_published(gpu, table))
    result = cells(configuration, gpu, FUSED)
    assert len(result) == 27
    assert set(result["table"]) == {table}
    assert list(result["ratio"]) == pytest.approx([1.0] * 27)
    assert spread(result) == pytest.approx(0, abs=1e-9)
    for other in set(paper.GPUS) - {gpu}:
        assert (cells(configuration, other, FUSED)["ratio"] - 1).abs().max() > 0.02


def test_a_ratio_is_ours_over_the_papers_with_the_interval_of_ours():
    result = cells(only(_as_published("h200", factor=1.2)), "h200", FUSED)
    cell = result[(result["method"] == "FI1") & (result["b"] == 64)].iloc[0]
    assert cell.provider == BASELINES["FI1"]
    assert (cell.paper, cell.ours) == (1.49, pytest.approx(1.2 * 1.49))
    assert cell.ratio == pytest.approx(1.2)
    assert cell.lo == pytest.approx(cell.ours * 0.9 / 1.1)
    assert cell.hi == pytest.approx(cell.ours * 1.1 / 0.9)


def test_the_spread_is_that_of_the_baselines_not_of_the_fused_kernel():
    rows = _as_published("h200")
    slow_kernel = [{**row, "median_us": 400.0} if row["fused"] else row for row in rows]
    assert spread(cells(only(slow_kernel), "h200", FUSED)) == pytest.approx(0, abs=1e-9)
    for row in rows:
        if (row["provider"], row["b"]) == (BASELINES["FI2"], 16):
            row["median_us"] *= 1.25
    assert spread(cells(only(rows), "h200", FUSED)) == pytest.approx(0.25)


def test_cells_that_were_not_measured_are_left_out():
    rows = [row for row in _as_published("h200") if row["provider"] != BASELINES["FI2"]]
    rows = [row for row in rows if row["b"] in (1, 64)]
    result = cells(only([*rows, _row(FUSED, 3, 10.0, fused=True)]), "h200", FUSED)
    assert sorted(result["method"].unique()) == ["FI1", "Multinomial"]
    assert sorted(result["b"].unique()) == [1, 64]


def test_several_gpus_compared_with_table_6():
    rows = [
        _row(FUSED, 16, 200.0, fused=True),
        _row(BASELINES["FI1"], 16, 300.0),
        _row(BASELINES["FI1"], 32, 300.0),  # a B that Table 6 does not have
    ]
    shape = {"d": 8192, "v": 128_256, "tp": 2}
    (cell,) = cells_over_ranks(only([{**row, **shape} for row in rows]), FUSED).itertuples()
    assert (cell.table, cell.method, cell.b, cell.ours) == (6, "FI1", 16, 1.5)
    assert cell.paper == pytest.approx(321.5 / 203.8)
    for change in ({"d": 4096}, {"tp": 3}, {"dtype": "fp16"}):
        other = only([{**row, **shape, **change} for row in rows])
        assert cells_over_ranks(other, FUSED).empty


@pytest.mark.parametrize(
    "change", [{"dtype": "fp16"}, {"tp": 2}, {"d": 2048}, {"v": 1000}], ids=str
)
def test_what_the_paper_did_not_measure_is_not_compared(change):
    configuration = only(_as_published("h200", **change))
    assert cells(configuration, "h200", FUSED).empty
    assert len(compare([configuration, only(_as_published("h200"))], "h200")) == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (_as_published("h200", d=2048), "expected bf16, D = 4096, V = 151936 or D = 8192"),
        (
            [_row(FUSED, 1, 10.0, fused=True), _row("lean", 1, 20.0)],
            f"one of {', '.join(BASELINES.values())}.*: {FUSED}, lean$",
        ),
        ([], "got no cell"),
    ],
    ids=["another shape", "no baseline of the paper", "no cell"],
)
def test_results_without_a_cell_of_the_paper_are_refused(rows, message):
    measured = configurations(pd.DataFrame(rows))
    with pytest.raises(ResultsError, match=message):
        compare(measured, "h200")


def test_two_measuring_conditions_are_two_tables():
    rows = _as_published("h200") + _as_published("h200", factor=2.0, graph=False)
    tables = compare(configurations(pd.DataFrame(rows)), "h200")
    assert sorted(round(table["ratio"].mean(), 6) for _, table in tables) == [1.0, 2.0]
