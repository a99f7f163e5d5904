"""The cost of storing the logits, against numbers computed by hand; its table and its figure."""

from __future__ import annotations

import pandas as pd
import pytest
from cells import only, results_row

from fsbench.paper import tables
from fsbench.report import logits_store
from fsbench.report.figures import configuration as plotting
from fsbench.report.figures.style import styles

FUSED, STORED = logits_store.pair()


def row(provider, b, median, d=4096, v=151936, **changes):
    columns = dict(label=provider, fused=provider == FUSED, d=d, v=v)
    return results_row(provider, b, median, 1 / median, **{**columns, **changes})


@pytest.fixture
def rows():
    times = {1: (300.0, 303.0), 3: (300.0, 299.0), 256: (500.0, 560.0)}
    return [
        row(name, b, time)
        for b, both in times.items()
        for name, time in zip((FUSED, STORED), both, strict=True)
    ]


def test_the_prediction_is_the_papers():
    published = tables.table(9)
    for cell in published.itertuples():
        predicted = 100 * logits_store.predicted(cell.b, cell.d, "bf16")
        assert predicted == pytest.approx(cell.predicted_pct, abs=0.0051)  # two digits are printed
    assert logits_store.predicted(64, 4096, "fp32") == 64 / 4096


def test_overhead_is_a_ratio_of_one_run_with_its_interval(rows):
    table = logits_store.overhead(only(rows))
    assert list(table.index) == [1, 3, 256]
    assert table.measured_pct.tolist() == pytest.approx([1.0, -1 / 3, 12.0])
    assert table.lo_pct[256] == pytest.approx(100 * (559 / 501 - 1))
    assert table.hi_pct[256] == pytest.approx(100 * (561 / 499 - 1))
    assert table.predicted_pct[256] == 12.5
    assert table.paper_pct.fillna(-1).tolist() == [0.9, -1, 15.2]
    other_shape = logits_store.overhead(only([{**each, "v": 1000} for each in rows]))
    assert len(other_shape) == 3 and other_shape.paper_pct.isna().all()
    two_runs = [{**each, "folder": each["provider"]} for each in rows]
    assert logits_store.overhead(only(two_runs)).empty
    fused_only = [each for each in rows if each["provider"] == FUSED]
    assert list(logits_store.files([only(rows)])) == ["logits_store_h200_d4096_v151936.csv"]
    assert logits_store.files([only(fused_only)]) == {}


def test_the_figure_has_the_line_the_measurement_and_the_paper(rows):
    frame = pd.DataFrame(rows)
    figure = plotting.logits_store(only(rows), styles(frame))
    fused = [each for each in rows if each["provider"] == FUSED]
    assert plotting.logits_store(only(fused), styles(frame)) is None
    (axes,) = figure.axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["predicted: 2B/D"].get_ydata()) == pytest.approx([0.0488, 0.1465, 12.5], 1e-2)
    assert list(lines["paper, on a B200"].get_xdata()) == [1, 256]
    (bars,) = axes.containers
    assert list(bars.lines[0].get_ydata()) == pytest.approx([1.0, -1 / 3, 12.0])
    assert bars.get_label() == f"{STORED}\nover {FUSED}"
