"""Advice from hand-made rows, and from the committed results through the command line."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from cells import results_row
from tree import H200
from typer.testing import CliRunner

from fsbench.analysis import logits_store
from fsbench.analysis.recommend import recommend
from fsbench.analysis.tables import configurations
from fsbench.cli import app
from fsbench.errors import FsbenchError, InvalidArgument, InvalidOption, ResultsError

RESULTS = H200


def row(provider, b, median, spread=0.01, **changes):
    return results_row(provider, b, median, spread, **{"label": provider.title(), **changes})


def advice(rows, candidates=None, **limits):
    (configuration,) = configurations(pd.DataFrame(rows))
    return recommend(configuration, candidates or {each["provider"] for each in rows}, **limits)


def test_the_fastest_and_what_it_saves_over_the_other_way():
    rows = [
        *(row("ours", b, t, fused=True) for b, t in ((1, 100.0), (8, 300.0))),
        *(row("theirs", b, t) for b, t in ((1, 150.0), (8, 200.0))),
        *(row("slow", b, 400.0) for b in (1, 8)),
        *(row("floor", b, 90.0, kind="lower_bound") for b in (1, 8)),
        *(row("greedy", b, 10.0, kind="greedy") for b in (1, 8)),
    ]
    first, second = advice(rows)
    assert (first.b, first.best, first.us) == (1, "ours", pytest.approx(100))
    assert (first.instead_of, first.saved_us) == ("theirs", pytest.approx(50))
    assert (second.b, second.best, second.us) == (8, "theirs", pytest.approx(200))
    assert (second.instead_of, second.saved_us) == ("ours", pytest.approx(100))
    assert first.ties == second.ties == ()


def test_only_candidates_count():
    rows = [row("ours", 1, 100.0, fused=True), row("theirs", 1, 150.0), row("slow", 1, 400.0)]
    (found,) = advice(rows, {"theirs", "slow"})
    assert (found.best, found.instead_of, found.saved_us) == ("theirs", None, None)
    assert advice(rows, {"nobody"}) == []


def test_memory_is_told_and_may_be_limited():
    rows = [
        *(row("copying", b, 100.0, fused=True, peak_extra_bytes=5e9) for b in (1, 8)),
        row("ours", 1, 200.0, fused=True, peak_extra_bytes=1e6),
        row("ours", 8, 200.0, fused=True, peak_extra_bytes=None),
        row("theirs", 1, 300.0, peak_extra_bytes=2e9),
    ]
    assert [(each.best, each.extra_bytes) for each in advice(rows)] == [
        ("copying", 5_000_000_000)
    ] * 2
    first, second = advice(rows, most_bytes=1e9)
    assert (first.best, first.extra_bytes, first.instead_of) == ("ours", 1_000_000, None)
    assert (second.best, second.extra_bytes) == ("ours", None)
    assert advice(rows, {"copying"}, most_bytes=1e9) == []


def test_the_kernel_with_the_store_is_no_candidate():
    _, stored = logits_store.pair()
    rows = [row("ours", 1, 100.0, fused=True), row(stored, 1, 101.0), row("theirs", 1, 150.0)]
    (found,) = advice(rows)
    assert (found.best, found.ties, found.instead_of) == ("ours", (), "theirs")
    assert advice([row(stored, 1, 100.0)]) == []


def test_what_the_measurement_cannot_tell_apart_is_a_tie():
    rows = [
        row("ours", 1, 100.0, fused=True),
        row("close", 1, 101.0, fused=True),
        row("clear", 1, 120.0),
    ]
    (found,) = advice(rows)
    assert found.ties == ("close",)


def test_runs_are_compared_through_a_sampler_that_both_have():
    """The second run's machine is twice as slow: its sampler is the faster one, not the slower."""
    rows = [
        row("ours", 1, 100.0, fused=True),
        row("theirs", 1, 150.0),
        row("ours", 1, 200.0, fused=True, folder="run2"),
        row("lean", 1, 220.0, folder="run2"),
    ]
    (found,) = advice(rows)
    assert found.best == "ours" and found.us == pytest.approx(200)
    assert (found.instead_of, found.saved_us) == ("lean", pytest.approx(20))


def run(*arguments):
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)], catch_exceptions=False)


def facts(*arguments):
    return json.loads(run("--results", RESULTS, *arguments, "--json").stdout)


def test_from_the_committed_results():
    found = facts("--model", "qwen3-8b", "--batch", "1,64,100")
    assert [each["b"] for each in found["advice"]] == [1, 64]
    assert all(each["best"].startswith("flash_sampling") for each in found["advice"])
    assert all(each["saved_us"] > 0 for each in found["advice"])
    assert [each["instead_of"] for each in found["advice"]] == ["gumbel_argmax"] * 2
    assert found["unmeasured"] == "B = 100"
    assert found["cannot"] == {}


def test_needs_rule_samplers_out_and_say_so():
    found = facts("--model", "qwen3-8b", "--needs", "logprob, seed")
    assert found["cannot"]["flashinfer_gumbel"] == ["logprob", "per_request_seed"]
    assert "flash_sampling" not in found["cannot"]
    assert found["unmeasured"] == "236 of these 256 batch sizes"
    printed = run("--results", RESULTS, "--model", "qwen3-8b", "--needs", "logprob").stdout
    assert "not considered: FI2 (FlashInfer Gumbel-Max), without logprob" in printed
    assert "not measured: 236" in printed


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--model", "qwen3-8b", "--needs", "speed"], InvalidArgument, "--needs: expected one of"),
        (["--model", "qwen3-8b", "--batch", "8:1"], InvalidOption, "--batch: expected a range"),
        (["--model", "qwen3-8b", "--batch", "5"], ResultsError, "results have B = 1, 2, 4, 8"),
        (["--model", "qwen3-8b", "--gpu", "b200"], ResultsError, "got none of b200"),
        (["--model", "gemma3-27b"], ResultsError, "fsbench run --preset lean --model gemma3-27b"),
        (["--model", "no-such-model"], FsbenchError, "no-such-model"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        run("--results", RESULTS / "paper-20261121", *arguments)


def test_a_declared_deviation_is_told(tmp_path):
    """Where FI2 wins, it is said that it is not exact."""
    rows = [row("flashinfer_gumbel", 1, 100.0), row("flash_sampling", 1, 150.0, fused=True)]
    (tmp_path / "env.json").write_text("{}")
    pd.DataFrame(rows).drop(columns="folder").to_csv(tmp_path / "results.csv", index=False)
    printed = run("--results", tmp_path, "--model", "qwen3-8b").stdout
    assert "not exact:" in printed and "drawn too rarely" in printed
