"""Time against the number of GPUs: the table, its file, and the figure read back."""

from __future__ import annotations

import io

import pandas as pd
import pytest
from cells import results_row

from fsbench.report import scaling
from fsbench.report.figures import scaling as scaling_figure
from fsbench.report.figures.style import styles
from fsbench.report.tables import configurations


def row(provider, b, tp, least, fused=False, **changes):
    columns = dict(d=8192, v=128256, tp=tp, fused=fused, timer="events", min_us=least)
    return results_row(provider, b, 1.1 * least, **{**columns, **changes})


ROWS = [
    *(row("ours", b, tp, 400.0 / tp + 10, fused=True) for b in (16, 64) for tp in (1, 2, 4)),
    *(row("theirs", b, tp, 500.0) for b in (16, 64) for tp in (1, 2)),
    row("theirs", 16, 4, float("nan"), status="timeout"),
]


def groups(rows):
    return scaling.over_ranks(configurations(pd.DataFrame(rows)))


def test_the_table_has_the_least_times_and_the_share_of_ideal_scaling():
    ((stem, alike),) = groups(ROWS).items()
    assert stem == "h200_d8192_v128256"
    table = scaling.scaling_table(alike)
    fused, stored = table.loc[(16, "ours")], table.loc[(16, "theirs")]
    assert (fused.tp1_min_us, fused.tp2_min_us, fused.tp4_min_us) == (410, 210, 110)
    assert (fused.tp2_ideal, fused.tp4_ideal) == pytest.approx((410 / 420, 410 / 440))
    assert fused.label == "Label of ours" and fused.tp1_median_us == pytest.approx(451)
    assert stored.tp2_ideal == 0.5 and pd.isna(stored.tp4_min_us)
    ((name, text),) = scaling.files(configurations(pd.DataFrame(ROWS))).items()
    assert name == "scaling_h200_d8192_v128256.csv"
    assert (
        pd.read_csv(io.StringIO(text)).set_index(["b", "provider"]).tp4_min_us[(64, "ours")] == 110
    )


def test_the_figure_has_the_times_and_the_ideal_line():
    ((_, alike),) = groups(ROWS).items()
    figure = scaling_figure.draw(alike, styles(pd.DataFrame(ROWS)))
    panels = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title(loc="left") for axes in panels] == ["B = 16", "B = 64"]
    lines = {line.get_label(): line.get_xydata().tolist() for line in figure.axes[0].get_lines()}
    assert lines["Label of ours"] == [[1, 410], [2, 210], [4, 110]]
    assert lines["ideal: the best exact TP = 1, over TP"] == [[1, 410], [2, 205], [4, 102.5]]
    assert "H200" in figure.get_suptitle()


def test_one_number_of_gpus_is_no_scaling():
    assert groups([row("ours", 16, 2, 200.0)]) == {}
    # Another timer is another way of measuring, not to be put into one line.
    assert groups([row("ours", 16, 1, 400.0, timer="cupti"), row("ours", 16, 2, 200.0)]) == {}


def test_without_one_gpu_there_is_no_ideal():
    rows = [row("ours", 16, tp, 400.0 / tp) for tp in (2, 4)]
    ((_, alike),) = groups(rows).items()
    assert "tp4_ideal" not in scaling.scaling_table(alike)
    figure = scaling_figure.draw(alike, styles(pd.DataFrame(rows)))
    assert [line.get_label() for line in figure.axes[0].get_lines()] == ["Label of ours"]
