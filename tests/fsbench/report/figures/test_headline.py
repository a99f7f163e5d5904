"""The headline figure, read back from its lines."""

from __future__ import annotations

import pandas as pd
import pytest
from cells import results_row

from fsbench.report.figures import headline
from fsbench.report.tables import configurations


def row(provider, b, median, **changes):
    return results_row(provider, b, median, 0.01, **changes)


def run(folder, logits, times):
    matmul = [row("matmul_only", b, 100.0, kind="lower_bound") for b in (1, 8)]
    rows = [*matmul, *(row(name, b, us, fused=fused) for name, fused, b, us in times)]
    return [each | {"folder": folder, "logits": logits} for each in rows]


def test_a_line_for_the_best_of_each_group_over_the_matmul_of_its_run():
    plain = [
        *(("flash_sampling_hopper", True, b, 95.0) for b in (1, 8)),
        *(("flash_sampling", True, b, 96.0) for b in (1, 8)),
        *(("race", False, b, 150.0) for b in (1, 8)),
        *(("argmax", False, b, us) for b, us in ((1, 105.0), (8, 110.0))),
        *(("flashinfer_gumbel", False, b, us) for b, us in ((1, 130.0), (8, 118.0))),
        *(("flashinfer_gumbel_lean", False, b, 120.0) for b in (1, 8)),
    ]
    # The portable kernel is faster here, but at fewer B: the line does not change its run.
    other = [("flash_sampling_screened", True, 1, 60.0), ("flash_sampling", True, 1, 90.0)]
    rows = run("a", "normal:1", plain) + run("b", "normal:3", other)
    ((stem, alike),) = headline.over_logits(configurations(pd.DataFrame(rows))).items()
    figure = headline.draw(alike)
    (axes,) = figure.axes
    assert stem == "h200_d4096_v151936"
    found = [list(line.get_ydata()) for line in axes.lines[:-1]]  # the last is the matmul
    expected = [[0.95, 0.95], [0.6], [1.05, 1.1], [1.2, 1.18]]
    assert found == [pytest.approx(each) for each in expected]
    texts = [text.get_text() for text in axes.texts]
    assert texts[-1] == "the matmul alone"
    named = [text.split(": ", 1)[1].replace("Label of ", "") for text in texts[:-1]]
    flashinfer = "flashinfer_gumbel_lean or flashinfer_gumbel"  # each at one B
    assert named == ["flash_sampling_hopper", "flash_sampling_screened", "argmax", flashinfer]
    width = figure.get_size_inches()[0]
    assert all(text.get_fontsize() * 850 / 96 / width >= 8 for text in axes.texts)


@pytest.mark.parametrize("name", ["matmul_only", "argmax", "flash_sampling"])
def test_without_the_matmul_or_one_of_both_ways_there_is_no_figure(name):
    times = [("flash_sampling", True, 1, 90.0), ("argmax", False, 1, 105.0)]
    rows = [each for each in run("a", "normal:1", times) if each["provider"] != name]
    assert headline.draw(configurations(pd.DataFrame(rows))) is None
