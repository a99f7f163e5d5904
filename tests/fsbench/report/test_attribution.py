"""What parts the I/O model and measurements, from hand-made rows and from the committed results."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from cells import results_row
from tree import H200
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.errors import FsbenchError
from fsbench.problem import Problem
from fsbench.records import iomodel
from fsbench.report.attribution import attribute, extend
from fsbench.report.tables import configurations

RESULTS = H200
COMMITTED = [RESULTS / f"{name}-20261123" for name in ("paper", "lean", "lean-d8192")]
D, V = 4096, 151936
MEASURED = ("slow", "matmul_only", "weight_stream")


def row(provider, b, median, busy=None, kernels=1, kind="exact", fused=False, **changes):
    own = dict(label=provider.title(), kind=kind, fused=fused, d=D, v=V, n_kernels=kernels)
    own["busy_us"] = busy if busy is not None else median
    return results_row(provider, b, median, 0, **{**own, **changes})


def run(batches=(1, 2, 4, 8, 16), fixed=40.0, passes=6.0, **changes):
    """A run in which `slow` takes what the extended model says, and 5 us of it are gaps."""
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


def only(rows):
    (found,) = configurations(pd.DataFrame(rows))
    return found


def test_the_parts_add_up_to_what_the_model_does_not_explain():
    table = attribute(only(run()), "fused", "slow", "matmul_only")
    assert list(table.index) == [1, 2, 4, 8, 16]
    unexplained = table.measured - table.predicted
    assert list(table.gaps + table.passes + table.matmul) == pytest.approx(list(unexplained))
    at = table.loc[16]
    slow = 316 + 40 + 6 * 270 * 16 / D
    assert at.predicted == iomodel.predicted_speedup(Problem(16, D, V))
    assert at.measured == pytest.approx(slow / 296)
    assert at.gaps == pytest.approx(5 / 296)
    assert at.matmul == pytest.approx(316 / 296 - 1)
    assert at.bound == pytest.approx(slow / 316)


def test_the_two_terms_are_found_again_and_tried_on_other_batches():
    found = extend(only(run()), *MEASURED)
    assert (found.fixed_us, found.passes) == (pytest.approx(40), pytest.approx(6))
    assert (found.kernels, found.gaps_us) == (6, pytest.approx(5))
    assert (found.fitted, found.held_out) == ((1, 4, 16), (2, 8))
    assert found.worst < 1e-9


def test_an_outlier_at_a_held_out_batch_is_seen_but_not_fitted():
    rows = run()
    (outlier,) = [r for r in rows if (r["provider"], r["b"]) == ("slow", 8)]
    outlier["median_us"] *= 1.25
    found = extend(only(rows), *MEASURED)
    assert found.fixed_us == pytest.approx(40)
    assert found.worst == pytest.approx(0.2)


def test_neither_term_is_negative():
    """A sampler that beats the matmul has no negative passes."""
    found = extend(only(run(fixed=-20.0, passes=1.0)), *MEASURED)
    assert found.fixed_us == 0 and found.passes >= 0
    assert found.worst > 0.01


def test_times_of_two_runs_are_not_mixed():
    first = [r for r in run() if r["provider"] != "matmul_only"]
    second = [r for r in run(folder="run2") if r["provider"] == "matmul_only"]
    mixed = only([*first, *second])
    assert attribute(mixed, "fused", "slow", "matmul_only").empty
    assert extend(mixed, *MEASURED) is None
    both = only([*run(folder="z"), *run(fixed=80.0, folder="a")])
    assert extend(both, *MEASURED).fixed_us == pytest.approx(80)  # the latest


def test_two_batches_are_too_few_to_try_a_fit():
    assert extend(only(run((1, 2))), *MEASURED) is None
    assert len(attribute(only(run((1, 2))), "fused", "slow", "matmul_only")) == 2


def test_a_timer_that_sees_no_kernels_leaves_their_part_open():
    rows = [{**r, "busy_us": None, "n_kernels": None} for r in run()]
    table = attribute(only(rows), "fused", "slow", "matmul_only")
    assert table.gaps.isna().all() and table.passes.isna().all() and table.matmul.notna().all()
    found = extend(only(rows), *MEASURED)
    assert (found.kernels, found.gaps_us) == (None, None)
    assert found.passes == pytest.approx(6)


def measured(*arguments):
    return CliRunner().invoke(app, ["iomodel", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture(scope="module")
def committed():
    """What `fsbench iomodel --measured` says of the committed results, by D."""
    options = [word for folder in COMMITTED for word in ("--measured", folder)]
    small, large = json.loads(measured(*options, "--json").stdout)
    assert small["configuration"] == "h200_d4096_v151936"
    assert large["configuration"] == "h200_d8192_v128256"
    return {4096: small, 8192: large}


def test_the_committed_results_are_predicted_within_ten_percent(committed):
    of_lean = pd.read_csv(COMMITTED[2] / "results.csv").provider.unique()
    for d, part in committed.items():
        assert len(part["extended"]) == len(part["speedups"]) == 7
        for found in part["extended"]:
            cut = d == 8192 and found["provider"] in of_lean  # a run that was stopped
            assert found["held_out"] == ([2, 8, 32] if cut else [2, 8, 32, 128])
            assert found["worst"] < 0.09, found
        for pair in part["speedups"]:
            for each in pair["rows"]:
                parts_of_it = each["gaps"] + each["passes"] + each["matmul"]
                assert parts_of_it == pytest.approx(each["measured"] - each["predicted"])


def test_tables_for_people():
    printed = measured("--measured", RESULTS / "lean-20261123").stdout
    assert "Speedup of FlashSampling (Hopper) over FI2, lean" in printed
    assert "two terms more" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--measured", RESULTS / "lean-20261123", "--model", "qwen3-8b"], "without --model"),
        (["--measured", RESULTS / "nowhere"], "nowhere"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(FsbenchError, match=message):
        measured(*arguments)


def test_results_without_a_matmul_are_refused(tmp_path):
    rows = [r for r in run() if r["provider"] != "matmul_only"]
    assert len(rows) == 15
    (tmp_path / "env.json").write_text('{"schema": 1}')
    pd.DataFrame(rows).drop(columns="folder").to_csv(tmp_path / "results.csv", index=False)
    with pytest.raises(FsbenchError, match="in one run with two lower bounds"):
        measured("--measured", tmp_path)
