"""The heat maps of truncated problems, read back from their cells."""

from __future__ import annotations

import pandas as pd
import pytest
from cells import results_row
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.report.figures import filters as filters_figure
from fsbench.report.tables import configurations


def row(provider, b, median, kind="truncated", **changes):
    kept = dict(top_k=50, top_p=0.9, min_p=0.0, mixed=False)
    return results_row(provider, b, median, 0.01, **{"kind": kind, **kept, **changes})


def rows():
    bounds = [
        row(name, b, time, "lower_bound", **filters)
        for name, time in (("read", 80.0), ("matmul", 100.0))
        for b in (1, 64)
        for filters in ({}, {"top_k": 1}, {"mixed": True})
    ]
    return [
        *bounds,
        *(row("ours", b, 110.0 + b, **f) for b in (1, 64) for f in ({}, {"top_k": 1})),
        row("ours", 64, 250.0, mixed=True),
        row("theirs", 1, 300.0),
        row("argmax", 1, 105.0, "greedy"),
        row("plain", 1, 90.0, "exact", top_k=0, top_p=1.0),
    ]


def grouped(rows):
    ((stem, group),) = filters_figure.over_filters(configurations(pd.DataFrame(rows))).items()
    return stem, group


def test_a_cell_is_the_time_over_that_of_the_matmul():
    stem, group = grouped(rows())
    assert stem == "h200_d4096_v151936"
    table = filters_figure.cost_table(group)
    assert list(table.filters.unique()) == [
        "top-k 1, top-p 0.9",
        "top-k 50, top-p 0.9",
        "top-k 50, top-p 0.9, mixed rows",
    ]
    cells = table.set_index(["provider", "filters", "b"]).ratio
    assert cells["ours", "top-k 50, top-p 0.9", 64] == pytest.approx(1.74)
    assert cells["ours", "top-k 50, top-p 0.9, mixed rows", 64] == pytest.approx(2.5)
    assert cells["theirs", "top-k 50, top-p 0.9", 1] == pytest.approx(3.0)
    assert set(table.provider) == {"ours", "theirs"}


def test_the_figure_has_a_panel_per_sampler_and_a_number_per_cell():
    _, group = grouped(rows())
    figure = filters_figure.draw(group)
    *panels, bar = (axes for axes in figure.axes if axes.get_visible())
    assert "log scale" in bar.get_xlabel()
    panels = {axes.get_title(loc="left").replace("\n", " "): axes for axes in panels}
    assert list(panels) == ["Label of ours", "Label of theirs"]
    fused, stored = ([text.get_text() for text in axes.texts] for axes in panels.values())
    assert fused == ["1.11", "1.74", "1.11", "1.74", "2.50"] and stored == ["3.00"]
    assert "top-k" not in figure._suptitle.get_text() and "normal:1" in figure._suptitle.get_text()


def test_without_a_lower_bound_there_is_no_figure():
    _, group = grouped([row("ours", 1, 100.0)])
    assert filters_figure.draw(group) is None


def test_plot_draws_the_heat_map_and_no_figure_for_each_setting(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    truncated = [made for made in rows() if made["provider"] != "plain"]
    pd.DataFrame(truncated).drop(columns="folder").to_csv(folder / "results.csv", index=False)
    done = CliRunner().invoke(app, ["plot", str(folder), "--out", str(tmp_path / "plots")])
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "plots").iterdir()] == [
        "filters_h200_d4096_v151936.png"
    ]
