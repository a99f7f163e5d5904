"""Speedup tables from hand-made results rows."""

import io

import pandas as pd
import pytest
from cells import only, results_row

from fsbench.errors import ResultsError
from fsbench.provider import Kind
from fsbench.report.tables import configurations, files, markdown, speedup_table


def _lost(provider, b, status, **changes):
    empty = dict(median_us=None, ci_lo_us=None, ci_hi_us=None)
    return results_row(provider, b, 0, status=status, reason="why", **{**empty, **changes})


@pytest.fixture
def rows():
    return [
        *(results_row("fast", b, t, fused=True) for b, t in ((1, 100.0), (2, 110.0), (4, 200.0))),
        *(results_row("slow", b, t) for b, t in ((1, 150.0), (2, 220.0), (4, 180.0))),
        *(results_row("argmax", b, 90.0, kind="greedy") for b in (1, 2, 4)),
        *(results_row("floor", b, 80.0, kind="lower_bound") for b in (1, 2, 4)),
    ]


def _through_csv(rows):
    """As fsbench reads it back: empty texts and n/a are NaN."""
    return pd.read_csv(io.StringIO(pd.DataFrame(rows).to_csv(index=False)))


def test_speedup_is_baseline_over_fused_with_conservative_interval(rows):
    table = speedup_table(only(rows))
    assert list(table.index) == [1, 2, 4]
    assert list(table["median_us.fast"]) == [100, 110, 200]
    assert list(table["speedup.fast.slow"]) == pytest.approx([1.5, 2.0, 0.9])
    assert list(table["speedup_lo.fast.slow"]) == pytest.approx(
        [x * 0.9 / 1.1 for x in (1.5, 2, 0.9)]
    )
    assert list(table["speedup_hi.fast.slow"]) == pytest.approx(
        [x * 1.1 / 0.9 for x in (1.5, 2, 0.9)]
    )
    assert list(table["ratio.fast.floor"]) == pytest.approx([1.25, 1.375, 2.5])


def test_on_a_problem_with_filters_truncated_samplers_are_compared(rows):
    kept = {"top_k": 50, "top_p": 0.9, "min_p": 0.0, "mixed": False}
    cut = [
        {**row, **kept, "kind": "truncated" if row["kind"] == "exact" else row["kind"]}
        for row in rows
    ]
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "mixed": False}
    plain, filtered = configurations(pd.DataFrame([{**row, **off} for row in rows] + cut))
    assert plain.drawn is Kind.EXACT and filtered.drawn is Kind.TRUNCATED
    assert filtered.conditions == f"{plain.conditions}, top-k 50, top-p 0.9"
    assert filtered.stem != plain.stem and filtered.stem.endswith("_k50_p0.9")
    assert list(speedup_table(filtered)["speedup.fast.slow"]) == pytest.approx([1.5, 2.0, 0.9])


def test_results_from_before_filters_existed_are_of_problems_without_filters(rows):
    new = [{**row, "top_k": 50, "kind": "truncated", "folder": "run2"} for row in rows]
    plain, filtered = configurations(pd.concat([pd.DataFrame(rows), pd.DataFrame(new)]))
    assert (plain.drawn, filtered.drawn) == (Kind.EXACT, Kind.TRUNCATED)
    assert list(filtered.rows.top_p.unique()) == [1.0] and not filtered.rows.mixed.any()


def test_only_exact_samplers_are_compared(rows):
    rows += [results_row("cut", b, 95.0, kind="truncated") for b in (1, 2, 4)]
    columns = list(speedup_table(only(rows)))
    assert [name for name in columns if name.startswith("speedup.")] == ["speedup.fast.slow"]
    assert [name for name in columns if name.startswith("ratio.")] == ["ratio.fast.floor"]


def test_without_a_fused_sampler_times_and_ratios_remain(rows):
    configuration = only([row for row in rows if not row["fused"]])
    table = speedup_table(configuration)
    assert not [name for name in table if name.startswith("speedup")]
    assert list(table["median_us.slow"]) == [150, 220, 180]
    assert list(table["ratio.slow.floor"]) == [1.875, 2.75, 2.25]
    assert "| 2 | 220.0 | 2.75 |" in markdown(configuration)


def test_ratios_never_mix_runs(rows):
    # A later run has only the baseline, so the speedup stays that of the first run.
    rows.append(results_row("slow", 1, 1000.0, folder="run2"))
    table = speedup_table(only(rows))
    assert table.loc[1, "speedup.fast.slow"] == pytest.approx(1.5)
    assert table.loc[1, "median_us.slow"] == 1000
    # With both in the later run, that one counts.
    rows.append(results_row("fast", 1, 250.0, fused=True, folder="run2"))
    assert speedup_table(only(rows)).loc[1, "speedup.fast.slow"] == pytest.approx(4.0)


def test_cells_that_failed_are_blank_and_named(rows):
    rows = [r for r in rows if (r["provider"], r["b"]) != ("slow", 4)] + [_lost("slow", 4, "oom")]
    configuration = only(rows)
    table = speedup_table(configuration)
    assert table.loc[4].filter(like="slow").isna().all()
    text = markdown(configuration)
    assert "| 4 | 200.0 |  | 2.50 |" in text
    assert "| 4 | 200.0 | oom | 90.0 | 80.0 |" in text


def test_markdown_is_shaped_like_table_4_and_bolds_the_peak(rows):
    assert markdown(only(rows)).splitlines() == [
        "# NVIDIA H200, D = 4,096, V = 151,936",
        "",
        "bf16, T = 1, logits normal:1, timer cupti, CUDA graph replay, cold L2.",
        "",
        "Times are medians in microseconds. A speedup is a ratio of medians of one run [with a "
        "conservative interval from both 95% intervals]; bold marks the peak of its column.",
        "",
        "## Label of fast",
        "",
        "| B | time, us | vs Label of slow | time / Label of floor |",
        "| ---: | ---: | ---: | ---: |",
        "| 1 | 100.0 | 1.50 [1.23, 1.83] | 1.25 |",
        "| 2 | 110.0 | **2.00** [1.64, 2.44] | 1.38 |",
        "| 4 | 200.0 | 0.90 [0.74, 1.10] | 2.50 |",
        "",
        "## Median time, us",
        "",
        "| B | Label of fast | Label of slow | Label of argmax | Label of floor (lower bound) |",
        "| ---: | ---: | ---: | ---: | ---: |",
        "| 1 | 100.0 | 150.0 | 90.0 | 80.0 |",
        "| 2 | 110.0 | 220.0 | 90.0 | 80.0 |",
        "| 4 | 200.0 | 180.0 | 90.0 | 80.0 |",
    ]


def test_labels_with_a_bar_or_with_the_same_text_are_separate_columns(rows):
    rows += [results_row("slower", b, 300.0) for b in (1, 2, 4)]
    text = markdown(only([{**row, "label": "a|b"} for row in rows]))
    assert "| B | time, us | vs a\\|b | vs a\\|b | time / a\\|b |" in text


@pytest.mark.parametrize(
    "changes, stems",
    [
        ({"gpu": "NVIDIA B200"}, ["b200_d4096_v151936", "h200_d4096_v151936"]),
        ({"gpu": "", "device": "cpu"}, ["cpu_d4096_v151936", "h200_d4096_v151936"]),
        ({"v": 128256}, ["h200_d4096_v128256", "h200_d4096_v151936"]),
        ({"graph": False}, ["h200_d4096_v151936_eager", "h200_d4096_v151936_graph"]),
        ({"dtype": "fp16"}, ["h200_d4096_v151936_bf16", "h200_d4096_v151936_fp16"]),
        ({"temperature": 0.7}, ["h200_d4096_v151936_t0.7", "h200_d4096_v151936_t1"]),
        ({"logits": "zipf:1"}, ["h200_d4096_v151936_normal-1", "h200_d4096_v151936_zipf-1"]),
        ({"weights": "fp8"}, ["h200_d4096_v151936_bf16", "h200_d4096_v151936_fp8"]),
        ({"tp": 2}, ["h200_d4096_v151936_tp1", "h200_d4096_v151936_tp2"]),
        ({"timer": "events"}, ["h200_d4096_v151936_cupti", "h200_d4096_v151936_events"]),
        ({"l2": "warm"}, ["h200_d4096_v151936_cold-l2", "h200_d4096_v151936_warm-l2"]),
    ],
)
def test_each_configuration_apart_with_names_as_long_as_needed(rows, changes, stems):
    result = configurations(_through_csv(rows + [{**row, **changes} for row in rows]))
    assert [configuration.stem for configuration in result] == stems
    for configuration in result:
        assert list(speedup_table(configuration)["median_us.fast"]) == [100, 110, 200]


def test_a_sampler_without_a_graph_is_beside_the_replays_of_its_run(rows):
    hosted = [results_row("hosted", b, 300.0, graph=False) for b in (1, 2, 4)]
    beside = only(_through_csv(rows + hosted))
    assert beside.stem == "h200_d4096_v151936"
    assert list(speedup_table(beside)["median_us.hosted"]) == [300] * 3
    assert beside.label("hosted") == "Label of hosted, no graph"
    assert beside.label("fast") == "Label of fast"
    assert "hosted" in beside.providers() and "hosted" not in beside.providers(Kind.EXACT)
    assert not [name for name in speedup_table(beside) if name.startswith("speedup.fast.hosted")]
    of_another_run = [{**row, "folder": "run2"} for row in hosted]
    apart = configurations(_through_csv(rows + of_another_run))
    assert [each.stem for each in apart] == ["h200_d4096_v151936_eager", "h200_d4096_v151936_graph"]


def test_two_spellings_of_a_gpu_are_one(rows):
    assert only([*rows, results_row("slow", 8, 300.0, gpu="h200")]).stem == "h200_d4096_v151936"


@pytest.mark.parametrize("read", [pd.DataFrame, _through_csv])
def test_cpu_rows_fresh_and_through_csv(rows, read):
    cpu = dict(gpu="", device="cpu", timer="cpu", graph=False, l2="n/a")
    (configuration,) = configurations(read([{**row, **cpu} for row in rows]))
    assert configuration.title == "CPU, D = 4,096, V = 151,936"
    assert configuration.conditions == "bf16, T = 1, logits normal:1, timer cpu, eager"
    assert configuration.providers(Kind.EXACT) == ["fast", "slow"]


def test_configurations_without_a_measured_cell_have_no_table(rows):
    rows += [_lost("slow", b, "error", v=128256) for b in (1, 2)]
    assert [c.stem for c in configurations(_through_csv(rows))] == ["h200_d4096_v151936"]
    assert configurations(pd.DataFrame()) == []


def test_invalid_results_are_named(rows):
    with pytest.raises(ResultsError, match=r"expected columns l2, ci_lo_us"):
        configurations(pd.DataFrame(rows).drop(columns=["l2", "ci_lo_us"]))
    for name in ("b", "d", "v", "tp"):
        for size in (-1.0, 0, float("nan")):
            with pytest.raises(ResultsError, match=f"results.csv: {name}: expected an integer >="):
                configurations(pd.DataFrame([{**rows[0], name: size}, *rows[1:]]))
    for name in ("provider", "dtype", "logits", "timer"):
        with pytest.raises(ResultsError, match=f"results.csv: {name}: expected a text in every"):
            configurations(_through_csv([{**rows[0], name: None}, *rows[1:]]))


def test_files(rows):
    texts = files(configurations(pd.DataFrame(rows).drop(columns="folder")))
    csv, text = texts["speedup_h200_d4096_v151936.csv"], texts["speedup_h200_d4096_v151936.md"]
    table = pd.read_csv(io.StringIO(csv))
    assert list(table.columns) == [
        "b",
        *(f"median_us.{name}" for name in ("fast", "slow", "argmax", "floor")),
        *(f"{quantity}.fast.slow" for quantity in ("speedup", "speedup_lo", "speedup_hi")),
        "ratio.fast.floor",
    ]
    assert list(table["speedup.fast.slow"]) == [1.5, 2.0, 0.9]
    assert len(texts) == 2 and text == markdown(only(rows))
