"""Figures of one configuration, read back from the matplotlib objects; reproducible files."""

import itertools

import numpy as np
import pandas as pd
import pytest
from cells import only, results_row

from fsbench.errors import ResultsError
from fsbench.problem import Problem
from fsbench.records import iomodel
from fsbench.report import logits_store
from fsbench.report.figures import configuration as plotting
from fsbench.report.figures import parts as figure_parts
from fsbench.report.figures.catalog import FIGURES
from fsbench.report.figures.style import styles
from fsbench.report.tables import speedup_table

BATCHES = (1, 2, 4)
PARTS = ("matmul_us", "sampling_us", "other_us")

OF_ONE = ("runtime", "speedup", "bandwidth", "breakdown", "costs", "logits_store")


def _row(provider, b, median, **changes):
    work = iomodel.traffic(Problem(b, 4096, 151936))
    return {
        **results_row(provider, b, median, ci_hi_us=1.2 * median),
        **dict(gb_per_s=work.fused_bytes / median / 1e3, tflops=work.flops / median / 1e6),
        **dict(matmul_us=0.9 * median, sampling_us=0.06 * median, other_us=0.04 * median),
        **dict(split_by="matmul" if changes.get("fused") else "names"),
        **dict(j_per_token=0.2, peak_extra_bytes=3_000_000 * b),
        **changes,
    }


def _rows(**changes):
    batches = changes.pop("batches", BATCHES)
    return [
        *(_row("fast", b, 300.0, fused=True, **changes) for b in batches),
        *(_row("faster", b, 290.0, fused=True, **changes) for b in batches),
        *(_row("slow", b, 450.0, **changes) for b in batches),
        *(_row("greedy_one", b, 310.0, kind="greedy", **changes) for b in batches),
        *(_row("floor", b, 260.0, kind="lower_bound", **changes) for b in batches),
    ]


def _rows_for(figure):
    """Return _rows with the samplers that one of the figures needs."""
    if figure != "logits_store":
        return _rows()
    return [*_rows(), *(_row(name, b, 300.0) for name in logits_store.pair() for b in BATCHES)]


def _panels(figure):
    return [axes for axes in figure.axes if axes.axison]


def test_scores_are_compared_if_no_sampler_draws():
    rows = [
        *(_row("fused_score", b, 300.0, fused=True, kind="score") for b in BATCHES),
        *(_row("stored_score", b, 450.0, kind="score") for b in BATCHES),
        *(_row("floor", b, 260.0, kind="lower_bound") for b in BATCHES),
    ]
    (ratio,) = plotting.speedups(only(rows))["fused_score"].values()
    assert set(ratio.value) == {1.5}
    assert "speedup.fused_score.stored_score" in speedup_table(only(rows))
    assert "fused_score" not in plotting.speedups(only([*rows, *_rows()]))


def _draw(name, rows):
    return FIGURES[name].draw([only(rows)], styles(pd.DataFrame(rows)))


def _lines(axes):
    return {line.get_label(): line for line in axes.get_lines()}


@pytest.fixture(scope="module")
def figures():
    return {name: _draw(name, _rows_for(name)) for name in OF_ONE}


def test_runtime_shows_every_provider_on_logarithmic_axes(figures):
    (axes,) = figures["runtime"].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    lines = _lines(axes)
    assert list(lines) == [
        "Label of fast",
        "Label of faster",
        "Label of slow",
        "greedy: Label of greedy_one",
        "no sampling: Label of floor",
    ]
    assert list(lines["Label of slow"].get_xdata()) == [1, 2, 4]
    assert list(lines["Label of slow"].get_ydata()) == [450, 450, 450]
    assert axes.get_ylabel() == "Median time (µs), log scale"


def test_batch_ticks_are_plain_powers_of_two():
    (axes,) = _draw("runtime", _rows(batches=(1, 3, 4, 256))).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1", "4", "256"]
    (axes,) = _draw("runtime", _rows(batches=(3, 5))).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3", "5"]
    (axes,) = _draw("runtime", _rows(batches=(4,))).axes  # a bound at one B is still a line
    assert list(_lines(axes)["no sampling: Label of floor"].get_xdata()) == [0, 1]


def test_title_names_gpu_shape_dtype_timer_and_graph(figures):
    for figure in figures.values():
        words = figure.axes[0].texts[0]
        assert words.get_text() == (
            "NVIDIA H200, D = 4,096, V = 151,936\n"
            "bf16, T = 1, logits normal:1, timer cupti, CUDA graph replay, cold L2"
        )


def test_speedup_has_a_panel_per_fused_sampler_with_intervals(figures):
    first, second = _panels(figures["speedup"])
    assert first.get_title(loc="left") == "Speedup of Label of fast"
    assert second.get_title(loc="left") == "Speedup of Label of faster"
    (bars,) = first.containers  # only the unfused exact sampler: neither greedy nor the bound
    assert bars.get_label() == "vs Label of slow"
    assert list(bars.lines[0].get_ydata()) == pytest.approx([1.5] * 3)
    (segments,) = bars.lines[2]
    low, high = segments.get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((450 * 0.9 / (300 * 1.2), 450 * 1.2 / (300 * 0.9)))


@pytest.mark.parametrize("gone", [("fast", "faster"), ("slow",)])
def test_no_speedup_figure_without_both_sides(gone):
    assert _draw("speedup", [row for row in _rows() if row["provider"] not in gone]) is None


@pytest.mark.parametrize("changes", [{"gpu": "", "device": "cpu"}, {"gpu": "NVIDIA X"}])
def test_unknown_gpu_has_no_peak(changes):
    (bandwidth,) = _draw("bandwidth", _rows(**changes)).axes
    assert not [label for label in _lines(bandwidth) if "peak" in label]
    assert bandwidth.child_axes == []


def test_bandwidth_is_in_gb_per_s_with_percent_of_the_datasheet_on_the_right(figures):
    (axes,) = figures["bandwidth"].axes
    lines = _lines(axes)
    assert lines["Label of slow"].get_ydata()[0] == pytest.approx(1244668000 / 450 / 1e3, rel=1e-4)
    assert set(lines["peak, datasheet:\n4.8 TB/s"].get_ydata()) == {4800}
    (right,) = axes.child_axes
    assert right.get_ylim()[1] == pytest.approx(axes.get_ylim()[1] / 48)
    assert right.get_ylabel() == "% of datasheet bandwidth"


def _look(style):
    return tuple(str(style.line.get(key)) for key in ("color", "marker", "linestyle"))


def test_styles_differ_within_results_and_do_not_depend_on_order():
    rows = [
        _row(f"{kind}{fused}{i}", 1, 1.0, kind=kind, fused=fused)
        for kind, fused, n in [
            ("exact", True, 6),
            ("exact", False, 14),
            ("greedy", False, 6),
            ("greedy", True, 6),
            ("lower_bound", False, 5),
        ]
        for i in range(n)
    ]
    looks = styles(pd.DataFrame(rows))
    assert looks == styles(pd.DataFrame(rows[::-1]))
    for (one, a), (other, b) in itertools.combinations(looks.items(), 2):
        assert _look(a) != _look(b), (one, other)
    assert len({looks[f"exactFalse{i}"].line["color"] for i in range(14)}) == 12
    assert all(("marker" in each.line) == (each.kind != "lower_bound") for each in looks.values())
    assert looks["exactTrue0"].line["linewidth"] > 1.5 * looks["exactFalse0"].line["linewidth"]
    rows.append(_row("absent", 1, 1.0, kind=None, status="unavailable"))
    assert "absent" not in styles(pd.DataFrame(rows)), "it never ran, and needs none"


def test_a_sampler_of_fsbench_has_one_color_in_all_figures_and_ours_are_emphasized():
    names = ("flash_sampling_auto", "gumbel_argmax", "vllm_gumbel")
    alone = [_row(name, 1, 1.0, fused=name.startswith("flash")) for name in names]
    among = [*alone, *(_row(f"other{i}", 1, 1.0, fused=i % 2 > 0) for i in range(20))]
    one, other = (styles(pd.DataFrame(rows)) for rows in (alone, among))
    assert all(one[name] == other[name] for name in names)
    filtered = [{**row, "kind": "truncated", "fused": False} for row in alone]
    looks = styles(pd.DataFrame(filtered))
    assert looks["flash_sampling_auto"].line == one["flash_sampling_auto"].line
    assert looks["flash_sampling_auto"].line["linewidth"] > looks["vllm_gumbel"].line["linewidth"]


@pytest.mark.parametrize("name", ("runtime", "speedup", "bandwidth", "breakdown"))
def test_legend_does_not_cover_the_axes_and_is_inside_the_figure(name):
    figure = _draw(name, _rows_for(name) + [_row(f"more{i}", 1, 400.0) for i in range(20)])
    (legend,) = (axes.get_legend() for axes in figure.axes if axes.get_legend())
    place = legend.get_window_extent()
    assert not any(place.overlaps(axes.get_window_extent()) for axes in _panels(figure))
    assert place.x1 <= figure.bbox.x1 and place.y0 >= figure.bbox.y0
    assert figure.get_figwidth() < 9  # the width of a page, where texts are as large as here


def test_breakdown_shows_both_parts_and_the_share_of_sampling():
    rows = [*_rows(), _row("by_difference", 1, 100.0, matmul_us=90.0, sampling_us=-1.0, other_us=0)]
    rows += [_row("unsplit", b, 200.0, **dict.fromkeys(PARTS)) for b in BATCHES]
    sampling, matmul, share, empty = _draw("breakdown", rows).axes
    assert list(_lines(sampling)["Label of slow"].get_ydata()) == pytest.approx([27.0] * 3)
    assert list(_lines(matmul)["Label of slow"].get_ydata()) == pytest.approx([405.0] * 3)
    assert list(_lines(share)["Label of slow"].get_ydata()) == pytest.approx([6.0] * 3)
    note = "by difference to its matmul form:\nLabel of fast,\nLabel of faster"
    assert note in [text.get_text() for text in empty.get_legend().get_texts()]
    assert not any("unsplit" in label for label in _lines(share))
    # Below 0: not on a logarithmic axis, but in the share.
    assert np.isnan(_lines(sampling)["Label of by_difference"].get_ydata()).all()
    assert list(_lines(share)["Label of by_difference"].get_ydata()) == pytest.approx([-100 / 89])


def test_breakdown_needs_a_sampler_whose_parts_are_known():
    columns = [{**row, **dict.fromkeys(PARTS)} for row in _rows()]
    without = [{k: v for k, v in row.items() if k not in PARTS} for row in _rows()]
    floor = [_row("floor", b, 260.0, kind="lower_bound") for b in BATCHES]
    assert [_draw("breakdown", rows) for rows in (columns, without, floor)] == [None] * 3


def test_costs_are_energy_and_memory_and_one_that_was_not_measured_is_named():
    energy, memory = _panels(_draw("costs", _rows()))
    assert list(_lines(energy)["Label of slow"].get_ydata()) == pytest.approx([0.2, 0.4, 0.8])
    assert list(_lines(memory)["Label of slow"].get_ydata()) == [3.0, 6.0, 12.0]
    assert memory.get_ylabel() == "MB beyond weight and hidden, log scale"
    energy, memory = _panels(_draw("costs", _rows(j_per_token=None)))
    assert [text.get_text() for text in energy.texts][-1] == "not measured"
    assert "Label of slow" in _lines(memory)
    assert _draw("costs", _rows(j_per_token=None, peak_extra_bytes=None)) is None


def test_a_long_name_in_the_title_takes_no_room_from_the_panels(figures):
    long = _draw("speedup", _rows(gpu="NVIDIA " + 60 * "X"))
    for one, other in zip(figures["speedup"].axes, long.axes, strict=True):
        assert one.get_position().bounds == pytest.approx(other.get_position().bounds)


def test_the_same_results_give_the_same_bytes_whatever_was_saved_before(tmp_path, figures):
    second = _draw("speedup", _rows())
    for suffix in ("png", "pdf", "svg"):
        figure_parts.save(figures["speedup"], tmp_path / f"one.{suffix}")
    for suffix in ("svg", "pdf", "png"):
        figure_parts.save(second, tmp_path / f"two.{suffix}")
    for suffix in ("png", "pdf", "svg"):
        content = (tmp_path / f"one.{suffix}").read_bytes()
        assert content == (tmp_path / f"two.{suffix}").read_bytes(), suffix
        assert b"Date" not in content and b"matplotlib.org" not in content
    assert len(list(tmp_path.iterdir())) == 6  # no temporary file is left
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match="cannot write figure"):
        figure_parts.save(figures["runtime"], tmp_path / "file" / "a.png")
