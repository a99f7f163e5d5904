"""Differences between the I/O model and measurements, from hand-made and from committed results."""

from __future__ import annotations

import json
import re

import pandas as pd
import pytest
from cells import only, results_row
from tree import newest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.errors import FsbenchError
from fsbench.problem import Problem
from fsbench.records import iomodel
from fsbench.report.attribution import attribute, extend

COMMITTED = [newest(name) for name in ("paper", "lean", "lean-d8192")]
D, V = 4096, 151936
MEASURED = ("slow", "matmul_only", "weight_stream")


def row(provider, b, median, busy=None, kernels=1, kind="exact", fused=False, **changes):
    columns = dict(label=provider.title(), kind=kind, fused=fused, d=D, v=V, n_kernels=kernels)
    columns["busy_us"] = busy if busy is not None else median
    return results_row(provider, b, median, 0, **{**columns, **changes})


def run(batches=(1, 2, 4, 8, 16), fixed=40.0, passes=6.0, **changes):
    """A run in which `slow` takes the time of the extended model, and 5 us of it are gaps."""
    rows = []
    for b in batches:
        matmul, stream = 300.0 + b, 270.0
        slow = matmul + fixed + passes * stream * b / D
        rows += [
            row("fused", b, 280.0 + b, fused=True, **changes),
            row("slow", b, slow, slow - 5.0, kernels=6, **changes),
            row("matmul_only", b, matmul, kind="lower_bound", **changes),
            row("weight_stream", b, stream, kind="lower_bound", **changes),
        ]
    return rows


def test_the_parts_add_up_to_what_the_model_does_not_explain():
    table = attribute(only(run()), "fused", "slow", "matmul_only")
    assert list(table.index) == [1, 2, 4, 8, 16]
    unexplained = table.measured - table.predicted
    assert list(table.gaps + table.passes + table.matmul) == pytest.approx(list(unexplained))
    last = table.loc[16]
    slow = 316 + 40 + 6 * 270 * 16 / D
    assert last.predicted == iomodel.predicted_speedup(Problem(16, D, V))
    assert last.measured == pytest.approx(slow / 296)
    assert last.gaps == pytest.approx(5 / 296)
    assert last.matmul == pytest.approx(316 / 296 - 1)
    assert last.bound == pytest.approx(slow / 316)


def test_the_fit_recovers_both_terms_and_is_tested_at_held_out_batches():
    rows = run()
    fit = extend(only(rows), *MEASURED)
    assert (fit.fixed_us, fit.passes) == (pytest.approx(40), pytest.approx(6))
    assert (fit.kernels, fit.gaps_us) == (6, pytest.approx(5))
    assert (fit.fitted, fit.held_out) == ((1, 4, 16), (2, 8))
    assert fit.worst < 1e-9
    (outlier,) = [r for r in rows if (r["provider"], r["b"]) == ("slow", 8)]
    outlier["median_us"] *= 1.25
    fit = extend(only(rows), *MEASURED)
    assert (fit.fixed_us, fit.worst) == (pytest.approx(40), pytest.approx(0.2))


def test_neither_term_is_negative():
    """A sampler that beats the matmul has no negative passes."""
    fit = extend(only(run(fixed=-20.0, passes=1.0)), *MEASURED)
    assert fit.fixed_us == 0 and fit.passes >= 0
    assert fit.worst > 0.01


def test_times_of_two_runs_are_not_mixed():
    first = [r for r in run() if r["provider"] != "matmul_only"]
    second = [r for r in run(folder="run2") if r["provider"] == "matmul_only"]
    mixed = only([*first, *second])
    assert attribute(mixed, "fused", "slow", "matmul_only").empty
    assert extend(mixed, *MEASURED) is None
    both = only([*run(folder="z"), *run(fixed=80.0, folder="a")])
    assert extend(both, *MEASURED).fixed_us == pytest.approx(80)  # the latest


def test_two_batches_are_too_few_to_test_a_fit():
    assert extend(only(run((1, 2))), *MEASURED) is None
    assert len(attribute(only(run((1, 2))), "fused", "slow", "matmul_only")) == 2


def test_parts_are_unknown_if_the_timer_sees_no_kernels():
    rows = [{**r, "busy_us": None, "n_kernels": None} for r in run()]
    table = attribute(only(rows), "fused", "slow", "matmul_only")
    assert table.gaps.isna().all() and table.passes.isna().all() and table.matmul.notna().all()
    fit = extend(only(rows), *MEASURED)
    assert (fit.kernels, fit.gaps_us, fit.passes) == (None, None, pytest.approx(6))


def measured(*arguments):
    return CliRunner().invoke(app, ["iomodel", *map(str, arguments)], catch_exceptions=False)


def test_the_committed_results_are_predicted_but_for_the_exponential_race():
    options = [word for folder in COMMITTED for word in ("--measured", folder)]
    parts = json.loads(measured(*options, "--json").stdout)
    assert [each["configuration"] for each in parts] == ["h200_d4096_v151936", "h200_d8192_v128256"]
    of_lean = pd.read_csv(COMMITTED[2] / "results.csv").provider.unique()
    for d, part in zip((4096, 8192), parts, strict=True):
        assert len(part["extended"]) == len(part["speedups"]) == 7
        for fit in part["extended"]:
            is_cut = d == 8192 and fit["provider"] in of_lean  # a run that was stopped
            assert fit["held_out"] == ([2, 8, 32] if is_cut else [2, 8, 32, 128])
            # It takes little more for 128 rows than for 64, but much more for 256.
            is_predicted = fit["provider"] != "exponential_race"
            assert fit["worst"] < (0.07 if is_predicted else 0.11), fit
        for pair in part["speedups"]:
            for each in pair["rows"]:
                sum_of_parts = each["gaps"] + each["passes"] + each["matmul"]
                assert sum_of_parts == pytest.approx(each["measured"] - each["predicted"])


def test_tables_for_people(tmp_path):
    (tmp_path / "env.json").write_text('{"schema": 1}')
    rows = [{**r, "busy_us": None} for r in run()]
    pd.DataFrame(rows).drop(columns="folder").to_csv(tmp_path / "results.csv", index=False)
    printed = measured("--measured", tmp_path).stdout
    assert "Speedup of Fused over Slow" in printed and "two terms more" in printed
    assert re.search(r" - +- +\+0\.", printed)  # gaps and passes are unknown
    with pytest.raises(FsbenchError, match="without --model"):
        measured("--measured", tmp_path, "--model", "qwen3-8b")
    rows = [r for r in run() if r["provider"] != "matmul_only"]
    pd.DataFrame(rows).drop(columns="folder").to_csv(tmp_path / "results.csv", index=False)
    with pytest.raises(FsbenchError, match="in one run with two lower bounds"):
        measured("--measured", tmp_path)
