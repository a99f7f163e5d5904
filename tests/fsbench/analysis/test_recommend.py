"""Advice from hand-made rows, and from the committed results through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from cells import results_row
from tree import H200
from typer.testing import CliRunner

from fsbench.analysis import logits_store
from fsbench.analysis.recommend import recommend
from fsbench.analysis.tables import configurations
from fsbench.cli import app
from fsbench.errors import FsbenchError, InvalidArgument, InvalidOption, ResultsError
from fsbench.problem import Problem
from fsbench.records import iomodel
from fsbench.records.store import read_environment

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
    assert (first.instead_of, first.instead_us) == ("theirs", pytest.approx(150))
    assert (second.b, second.best, second.us) == (8, "theirs", pytest.approx(200))
    assert (second.instead_of, second.instead_us) == ("ours", pytest.approx(300))
    assert first.ties == second.ties == ()


def test_only_candidates_count():
    rows = [row("ours", 1, 100.0, fused=True), row("theirs", 1, 150.0), row("slow", 1, 400.0)]
    (found,) = advice(rows, {"theirs", "slow"})
    assert (found.best, found.instead_of, found.instead_us) == ("theirs", None, None)
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


def test_all_times_of_a_line_are_of_the_last_run_that_has_both_ways():
    rows = [
        row("ours", 1, 100.0, fused=True),
        row("theirs", 1, 150.0),
        row("ours", 1, 200.0, fused=True, folder="run2"),
        row("lean", 1, 220.0, folder="run2"),
        row("ours", 1, 90.0, fused=True, folder="run3"),
        row("ours", 8, 90.0, fused=True, folder="run3"),
    ]
    found, alone = advice(rows)
    assert (found.folder, found.best, found.us) == ("run2", "ours", 200)
    assert (found.instead_of, found.instead_us) == ("lean", 220)
    assert (alone.folder, alone.instead_of) == ("run3", None)


def test_samplers_of_truncated_problems_are_compared_with_the_next():
    rows = [row(name, 1, us, kind="truncated", top_k=50) for name, us in (("a", 2.0), ("b", 1.0))]
    (found,) = advice(rows)
    assert (found.best, found.instead_of) == ("b", "a")


def run(*arguments):
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)], catch_exceptions=False)


def facts(*arguments):
    return json.loads(run("--results", RESULTS, *arguments, "--json").stdout)


def written(folder, rows, **environment):
    folder.mkdir(parents=True)
    (folder / "env.json").write_text(json.dumps({"schema": 1, "utc": "2026-01-01", **environment}))
    pd.DataFrame(rows).drop(columns="folder").to_csv(folder / "results.csv", index=False)
    return folder


def test_every_number_from_the_committed_results_stands_in_a_record():
    found = facts("--model", "qwen3-8b", "--batch", "1,64,100")
    assert [each["b"] for each in found["advice"]] == [1, 64]
    for each in found["advice"]:
        cells = pd.read_csv(Path(each["folder"]) / "results.csv").query("b == @each['b']")
        times = (
            cells[(cells.d == 4096) & (cells.v == 151936) & cells.graph]
            .set_index("provider")
            .median_us
        )
        assert times[each["best"]] == pytest.approx(each["us"], rel=1e-5)  # the CSV has 6 digits
        assert times[each["instead_of"]] == pytest.approx(each["instead_us"], rel=1e-5)
        assert each["instead_us"] > each["us"]
        run_of = read_environment(Path(each["folder"]))
        told = found["runs"][each["folder"]]
        assert told == {"utc": run_of["utc"], "git_sha": run_of["git_sha"]}
    assert found["unmeasured"] == "B = 100"
    assert found["cannot"] == {}
    assert found["elsewhere"] == {"flash_sampling_screened": "--logits normal:3"}
    by_size = facts("--d", 4096, "--v", 151936, "--batch", "1,64,100")
    assert by_size == found


def test_a_need_that_was_timed_with_filters_alone_is_pointed_to():
    found = facts("--model", "qwen3-8b", "--batch", "16", "--needs", "penalties")
    assert list(found["elsewhere"]) == ["flash_sampling_topk_topp"]
    filters = ("--top-k", "50", "--top-p", "0.9")
    found = facts("--model", "qwen3-8b", "--batch", "16", "--needs", "penalties", *filters)
    assert found["elsewhere"] == {}
    assert found["advice"][0]["best"] == "flash_sampling_topk_topp"
    assert facts("--model", "qwen3-8b", *filters)["elsewhere"] == {}


def test_the_latest_run_counts_whatever_its_name(tmp_path):
    both = [row("flash_sampling", 1, 100.0, fused=True), row("gumbel_argmax", 1, 150.0)]
    written(tmp_path / "a", both, utc="2026-02-01T00:00:00+00:00", git_sha="1234567890")
    written(tmp_path / "b", [{**each, "median_us": 200.0} for each in both])
    done = run("--results", tmp_path, "--model", "qwen3-8b")
    assert "run a: a, 2026-02-01 00:00 UTC, commit 1234567\n" in done.stdout
    assert " 100.0 " in done.stdout and " 200.0" not in done.stdout


def test_needs_rule_samplers_out_and_say_so():
    found = facts("--model", "qwen3-8b", "--needs", "logprob, seed")
    assert found["cannot"]["flashinfer_gumbel"] == ["logprob", "per_request_seed"]
    assert "flash_sampling" not in found["cannot"]
    assert found["unmeasured"] == f"{256 - len(found['advice'])} of these 256 batch sizes"
    (call,) = {each["python"] for each in found["calls"].values()}
    assert "flash_sample(" in call and "return_logprob=True" in call
    printed = run("--results", RESULTS, "--model", "qwen3-8b", "--needs", "logprob").stdout
    assert "not considered: " in printed and "without logprob" in printed
    assert "No time is with --needs" in printed
    assert "--needs" not in run("--results", RESULTS, "--model", "qwen3-8b").stdout


@pytest.mark.parametrize(
    ("options", "python", "vllm"),
    [
        (["--top-k", 50, "--top-p", 0.9], "truncated_sample(", "flash_sample"),
        (["--tp", 4], "flash_sample(hidden, shard", "flash_sample"),
        (["--logits", "normal:3"], "screened_sample(hidden, head", "screened"),
        (["--batch", "129"], "fsbench.kernels.gumbel_argmax import PROVIDER", "gumbel_argmax"),
    ],
)
def test_what_to_call(options, python, vllm):
    calls = facts("--model", "qwen3-8b", *options)["calls"].values()
    told = {call["vllm"] for call in calls if python in call["python"]}
    assert told == {f"FSBENCH_VLLM={vllm} vllm serve MODEL"}


def test_a_screened_head_over_several_gpus_is_one_of_the_shard(tmp_path):
    written(tmp_path / "run", [row("flash_sampling_screened", 1, 100.0, tp=2)])
    options = ["--results", tmp_path, "--model", "qwen3-8b", "--tp", 2, "--batch", 1, "--json"]
    (call,) = json.loads(run(*options).stdout)["calls"].values()
    assert call["python"].splitlines() == [
        "from fsbench.kernels import VocabShard, prepare_head, screened_sample",
        "shard = VocabShard(weight_rows_of_this_rank, group)  # once, on all ranks",
        "head = prepare_head(shard.weight)  # once",
        "sample = screened_sample(hidden, head, shard=shard, seed=seed, offset=step)",
    ]
    assert call["vllm"] == "FSBENCH_VLLM=flash_sample vllm serve MODEL"


def test_without_a_record_the_floor_is_marked():
    found = facts("--model", "qwen3-8b", "--gpu", "h100", "--batch", "1,7")
    floor = iomodel.floor_us(Problem(7, 4096, 151936), "h100")
    assert list(found["floors_us"]) == ["1", "7"] and found["floors_us"]["7"] == floor
    assert found["advice"] == [] and found["sizes"] == []
    printed = run("--results", RESULTS, "--d", 64, "--v", 1000, "--batch", "3:9").stdout
    assert "nobody measured it" in printed and "flash_sample(" in printed
    assert "fsbench run --device cuda --d 64 --v 1000 --dtype bf16" in " ".join(printed.split())
    assert facts("--model", "phi-4", "--logits", "zipf:2")["measure"].endswith("--logits zipf:2")


def test_a_cpu_after_make_bench(tmp_path):
    changes = dict(device="cpu", gpu="", graph=False, timer="cpu", l2="", dtype="fp32", d=2048)
    written(tmp_path / "run", [row("multinomial", 4, 9000.0, **changes)])
    options = ["--results", tmp_path, "--gpu", "cpu"]
    assert "9000.0" in run(*options, "--model", "qwen3-1.7b").stdout
    found = json.loads(run(*options, "--d", 2048, "--v", 151_936, "--json").stdout)
    names = dict(B=4, weight=torch.randn(500, 2048), hidden=torch.randn(4, 2048), seed=0, step=0)
    exec(found["calls"]["multinomial"]["python"], names)
    assert names["tokens"].shape == (4,) and names["problem"].device == "cpu"
    with pytest.raises(ResultsError, match="fsbench run --device cpu --d 4096"):
        run(*options, "--model", "qwen3-8b")


def test_it_works_anywhere_and_fits_80_columns(tmp_path, monkeypatch):
    """Without --results: those that come with fsbench, and those of the folder at hand."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    options = ["--model", "qwen3-8b", "--top-k", 50, "--top-p", 0.9]
    (tmp_path / "results/cpu/e2e").mkdir(parents=True)  # of a command that times no sampler
    done = run(*options)
    assert "flash_sampling_topk_topp" in done.stdout
    assert "vLLM 0" not in done.stdout  # docs/end-to-end.md says which versions
    assert max(map(len, done.stdout.splitlines())) <= 80
    changes = dict(kind="truncated", top_k=50, top_p=0.9)
    mine = [row(name, 1, 1.5, **changes) for name in ("akunu_exact", "pivot_search")]
    written(tmp_path / "results/own", mine, utc="2099-01-01")
    assert "own, 2099-01-01" in run(*options).stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--model", "qwen3-8b", "--needs", "speed"], InvalidArgument, "--needs: expected one of"),
        (["--model", "qwen3-8b", "--batch", "8:1"], InvalidOption, "--batch: expected a range"),
        (["--model", "qwen3-8b", "--batch", "5"], ResultsError, "results have B = 1, 2, 4, 8"),
        (["--model", "qwen3-8b", "--gpu", "b20"], InvalidArgument, "gpu: expected one of"),
        (["--model", "no-such-model"], FsbenchError, "no-such-model"),
        (["--model", "phi-4", "--tp", "2", "--top-k", "9"], ResultsError, "runs on one GPU"),
        ([], InvalidArgument, "--model: expected a model, or --d and --v; got neither"),
        (["--d", "4"], InvalidArgument, "expected a model, or --d and --v; got --d 4"),
        (["--model", "phi-4", "--v", "9"], InvalidArgument, "got --model phi-4 --v 9"),
    ],
)
def test_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        run("--results", RESULTS / "paper-20261123", *arguments)


def test_a_declared_deviation_is_told(tmp_path):
    """Where FI2 wins, it is said that it is not exact."""
    rows = [row("flashinfer_gumbel", 1, 100.0), row("flash_sampling", 1, 150.0, fused=True)]
    printed = run("--results", written(tmp_path / "run", rows), "--model", "qwen3-8b").stdout
    assert "not exact:" in printed and "drawn too rarely" in " ".join(printed.split())
