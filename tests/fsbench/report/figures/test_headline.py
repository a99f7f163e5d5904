"""The headline figure, read back from its lines."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from cells import results_row

from fsbench.report.figures import headline
from fsbench.report.tables import configurations


def row(provider, b, median, **changes):
    return results_row(provider, b, median, 0.01, **changes)


def run(folder, logits, times):
    batches = sorted({b for *_, b, _ in times} | {1, 8})
    matmul = [row("matmul_only", b, 100.0, kind="lower_bound") for b in batches]
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
    # No line has a batch size that the fused one lacks.
    other.append(("flash_sampling_screened", True, 5, 170.0))
    rows = run("a", "normal:1", plain) + run("b", "normal:3", other)
    ((stem, alike),) = headline.over_logits(configurations(pd.DataFrame(rows))).items()
    figure = headline.draw(alike)
    (axes,) = figure.axes
    assert stem == "h200_d4096_v151936"
    values = [list(line.get_ydata()) for line in axes.lines[:-1]]  # the last is the matmul
    expected = [[0.95, 0.95], [0.6], [1.05, 1.1], [1.2, 1.18]]
    assert values == [pytest.approx(each) for each in expected]
    first, *names = [text.get_text() for text in axes.texts]
    assert first == "the matmul alone"
    named = [text.split(": ", 1)[1].replace("Label of ", "") for text in names]
    flashinfer = "flashinfer_gumbel_lean or Label of flashinfer_gumbel"  # each at one B
    assert " or ".join(named) == " or ".join(
        ["flash_sampling_hopper", "flash_sampling_screened", "argmax", flashinfer]
    ).replace("or Label of", "or")
    assert "lower is better" in axes.get_ylabel()
    title = "Fused sampling takes 10 to 14 % less time than the best that stores logits"
    assert figure.get_suptitle() == title
    width = figure.get_size_inches()[0]
    assert all(text.get_fontsize() * 850 / 96 / width >= 8 for text in axes.texts)


@pytest.mark.parametrize("name", ["matmul_only", "argmax", "flash_sampling"])
def test_without_the_matmul_or_one_of_both_ways_there_is_no_figure(name):
    times = [("flash_sampling", True, 1, 90.0), ("argmax", False, 1, 105.0)]
    rows = [each for each in run("a", "normal:1", times) if each["provider"] != name]
    assert headline.draw(configurations(pd.DataFrame(rows))) is None


def test_the_public_call_and_vllm_have_lines_of_their_own_and_names_cross_nothing():
    times = [
        *(("flash_sampling_auto", True, b, 97.0) for b in (1, 8)),
        *(("flash_sampling", True, b, 90.0) for b in (1, 8)),
        *(("argmax", False, b, 105.0 - b) for b in (1, 8)),
        *(("flashinfer_gumbel", False, b, 125.0) for b in (1, 8)),
        *(("vllm_gumbel", False, b, 132.0 + b) for b in (1, 8)),
    ]
    eager = [each | {"graph": False} for each in run("b", "normal:1", times)]
    frame = pd.DataFrame([*run("a", "normal:1", times), *eager])
    ((stem, alike),) = headline.over_logits(configurations(frame)).items()
    assert stem == "h200_d4096_v151936"
    figure = headline.draw(alike)
    (axes,) = figure.axes
    fused, _, _, vllm, _ = [list(line.get_ydata()) for line in axes.lines]
    assert fused == pytest.approx([0.97, 0.97]) and vllm == pytest.approx([1.33, 1.4])
    assert figure.get_suptitle().endswith("at 1 of 2 batch sizes, by up to 7 %")
    boxes = [text.get_window_extent() for text in axes.texts]
    for number, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[number + 1 :])
        for line in axes.lines[:-1]:
            start, end = axes.transData.transform(line.get_xydata())
            for x, y in start + np.linspace(0, 1, 200)[:, None] * (end - start):
                assert not box.contains(x, y), line
