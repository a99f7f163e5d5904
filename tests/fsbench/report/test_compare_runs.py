"""Two runs, cell by cell, from hand-made results rows."""

import pandas as pd
import pytest
from cells import results_row

from fsbench.errors import ResultsError
from fsbench.report import compare as runs
from fsbench.report.compare import (
    Verdict,
    clock_differences,
    environment_differences,
    lost,
    pairs,
    verdict,
)


def _row(provider, b, median, **changes):
    return results_row(provider, b, median, **{"label": provider, **changes})


def _lost(provider, b, status):
    empty = dict(median_us=None, ci_lo_us=None, ci_hi_us=None)
    return _row(provider, b, 0, status=status, reason="why", **empty)


def _pairs(a, b):
    return pairs(pd.DataFrame(a), pd.DataFrame(b))


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [
        (1.021, 1.03, Verdict.SLOW),
        (1.02, 1.03, Verdict.AMBIGUOUS),
        (0.98, 1.02, Verdict.SAME),
        (0.979, 1.0, Verdict.AMBIGUOUS),
        (0.9, 0.98, Verdict.AMBIGUOUS),
        (0.9, 0.979, Verdict.FAST),
        (0.5, 2.0, Verdict.AMBIGUOUS),
    ],
)
def test_the_verdict_asks_for_the_whole_interval(lo, hi, expected):
    assert verdict(lo, hi, 0.02) == expected


def test_the_ratio_is_b_over_a_with_the_conservative_interval():
    (cell,) = _pairs([_row("one", 2, 100.0)], [_row("one", 2, 150.0)]).itertuples()
    assert (cell.provider, cell.b, cell.median_us_a, cell.median_us_b) == ("one", 2, 100, 150)
    assert cell.ratio == 1.5
    assert cell.lo == pytest.approx(1.5 * 0.9 / 1.1)
    assert cell.hi == pytest.approx(1.5 * 1.1 / 0.9)


def test_cells_are_paired_by_identity_not_by_place_label_or_gpu():
    a = [_row("one", 2, 10.0), _row("one", 16, 20.0), _row("two", 2, 30.0)]
    b = [_row(**{"provider": "two", "b": 2, "median": 60.0}, gpu="NVIDIA B200", label="Two")]
    b += [_row("one", 16, 20.0, gpu="NVIDIA B200"), _row("one", 2, 5.0, gpu="NVIDIA B200")]
    cells = _pairs(a, b)
    assert list(zip(cells["provider"], cells["b"], cells["ratio"], strict=True)) == [
        ("one", 2, 0.5),
        ("one", 16, 1.0),
        ("two", 2, 2.0),
    ]


@pytest.mark.parametrize(
    "change",
    [
        *({"timer": "events"}, {"graph": False}, {"l2": "warm"}, {"dtype": "fp16"}, {"tp": 2}),
        *({"temperature": 0.5}, {"logits": "zipf:1"}, {"d": 8192}, {"v": 128256}, {"b": 4}),
        {"provider": "two"},
    ],
    ids=str,
)
def test_another_problem_or_way_of_measuring_is_another_cell(change):
    row = _row("one", 2, 10.0)
    with pytest.raises(ResultsError, match="at least one cell measured in both; A has D = 4096"):
        _pairs([row], [{**row, **change}])
    common = _row("common", 2, 10.0)
    cells = _pairs([row, common], [{**row, **change}, common])
    assert sorted(cells["ratio"].dropna()) == [1.0]
    assert sorted(cells["status_a"]) == sorted(cells["status_b"]) == ["absent", "ok", "ok"]


def test_missing_texts_do_not_keep_cells_apart(tmp_path):
    """On a CPU, l2 is n/a and the GPU's name empty; pandas reads both as missing."""
    row = _row("one", 2, 10.0, gpu="", device="cpu", l2="n/a", timer="cpu")
    pd.DataFrame([row]).to_csv(tmp_path / "results.csv")
    (cell,) = pairs(pd.read_csv(tmp_path / "results.csv"), pd.DataFrame([row])).itertuples()
    assert cell.ratio == 1


def test_a_cell_that_b_could_not_measure_is_lost_and_an_absent_one_is_not():
    a = [_row("one", b, 10.0) for b in (1, 2, 4)] + [_lost("two", 1, "oom")]
    b = [_row("one", 1, 10.0), _lost("one", 2, "error"), _lost("two", 1, "error")]
    cells = _pairs(a, b)
    (gone,) = lost(cells, "b").itertuples()
    assert lost(cells, "a").empty  # neither run measured "two"
    assert (gone.provider, gone.b, gone.status_b, gone.reason_b) == ("one", 2, "error", "why")
    absent = cells[cells["status_b"] == runs.ABSENT]
    assert list(absent["b"]) == [4]
    assert cells["ratio"].notna().sum() == 1


def test_cells_that_only_one_run_has_are_named():
    a = [_row("one", b, 10.0) for b in (1, 2)] + [_row("two", 1, 10.0), _row("two", 2, 10.0)]
    b = [_row("one", 1, 10.0), _row("two", 1, 10.0), _row("one", 1, 10.0, d=64)]
    b += [_row("three", b, 10.0) for b in (1, 2)] + [_row("four", 4, 10.0)]
    cells = _pairs(a, b)
    ((samplers, count),) = runs.only_in(cells, "a")
    assert samplers.startswith("one, two at B = 2; D = 4,096, V = 151,936: bf16") and count == 2
    lacking = [(words.partition(", V")[0], count) for words, count in runs.only_in(cells, "b")]
    assert lacking == [
        *(("one at B = 1; D = 64", 1), ("three at B = 1, 2; D = 4,096", 2)),
        ("four at B = 4; D = 4,096", 1),
    ]


def test_a_time_of_a_cell_that_failed_after_some_rounds_is_no_time():
    a = [_row("one", b, 10.0) for b in (1, 2)]
    cells = _pairs(a, [a[0], {**a[1], "status": "oom"}])
    assert list(cells["ratio"].notna()) == [True, False]
    assert list(cells[["lo", "hi"]].notna().all(axis=1)) == [True, False]


@pytest.mark.parametrize("name", ["A", "B"])
def test_a_run_without_a_measured_cell_is_named(name):
    whole, empty = [_row("one", 1, 10.0)], [_lost("one", 1, "oom")]
    with pytest.raises(ResultsError, match=f"^{name}: expected at least one cell with status ok"):
        _pairs(*((empty, whole) if name == "A" else (whole, empty)))


def test_environments_differ_in_machine_programs_and_options_not_in_time_and_place():
    a = {
        **dict(schema=1, utc="yesterday", argv=["run"], gpu="NVIDIA H200", driver="580"),
        **dict(cupti=None, options={"iters": 100, "seed": 0}),
    }
    assert environment_differences(a, {**a, "utc": "today", "argv": ["run", "--out", "x"]}) == []
    b = {**a, "driver": "590", "options": {"iters": 50, "seed": 0}, "resumed": [{}, {}]}
    del b["cupti"]
    a["times"], b["times"] = [{"phases": {"timing": 1.0}}], [{"phases": {"timing": 2.0}}]
    a["sizes"], b["sizes"] = {"l2": {"mb": 50}, "sms": 132}, {"l2": {"mb": 60}, "sms": 132}
    assert environment_differences(a, b) == [
        ("driver", "580", "590"),
        ("sizes.l2.mb", 50, 60),
        ("options.iters", 100, 50),
        ("resumed", 0, 2),
    ]


def test_clocks_differ_where_both_runs_measured_and_both_know_them():
    a = [_row("one", b, 10.0, sm_mhz=1980.0, mem_mhz=None) for b in (1, 2, 4)]
    assert clock_differences(_pairs(a, a)) == []
    b = [{**row, "sm_mhz": 1755.0, "mem_mhz": 3201.0} for row in a[:2]]
    b += [_row("two", 1, 10.0, sm_mhz=345.0)] * 3
    assert clock_differences(_pairs(a, b)) == [("median sm_mhz", 1980.0, 1755.0)]
    unknown = [{**row, "sm_mhz": None} for row in a]
    assert clock_differences(_pairs(a, unknown)) == []
