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

from fsbench.cli import app
from fsbench.errors import FsbenchError, InvalidArgument, InvalidOption, ResultsError
from fsbench.problem import Problem
from fsbench.records import iomodel
from fsbench.records.store import read_environment
from fsbench.report import logits_store
from fsbench.report.recommend import recommend
from fsbench.report.tables import configurations

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


def test_the_run_is_that_with_the_strongest_alternative():
    """A later run that lacks the strongest sampler of one way would overstate the gain."""
    rows = [
        *(row("floor", 1, 95.0, kind="lower_bound", folder=f"run{n}") for n in (1, 2, 3, 4)),
        row("ours", 1, 100.0, fused=True),
        row("lean", 1, 120.0),
        row("ours", 1, 101.0, fused=True, folder="run2"),
        row("lean", 1, 118.0, folder="run2"),
        row("ours", 1, 90.0, fused=True, folder="run3"),
        row("theirs", 1, 150.0, folder="run3"),
        row("weaker", 1, 117.0, fused=True, folder="run4"),
        row("lean", 1, 118.0, folder="run4"),
        row("ours", 8, 90.0, fused=True, folder="run3"),
    ]
    found, alone = advice(rows)
    assert (found.folder, found.best, found.us) == ("run2", "ours", 101)
    assert (found.instead_of, found.instead_us) == ("lean", 118)
    assert (alone.folder, alone.instead_of) == ("run3", None)


def test_the_sampler_that_users_call_stands_for_those_that_force_its_kernels():
    rows = [
        row("portable", 1, 110.0, fused=True),
        row("hopper", 1, 99.0, fused=True),
        row("theirs", 1, 150.0),
    ]
    called = row("call", 1, 101.0, fused=True)
    forced = {"portable": "call", "hopper": "call"}
    (found,) = advice(rows, forced=forced)
    assert found.best == "hopper"
    (found,) = advice([*rows, called], forced=forced)
    assert (found.best, found.us, found.instead_of) == ("call", 101, "theirs")
    elsewhere = {**called, "folder": "run2"}
    rows += [elsewhere, row("slow", 1, 190.0, folder="run2")]
    (found,) = advice(rows, forced=forced)
    assert (found.best, found.instead_of) == ("hopper", "theirs")


def test_where_all_candidates_go_one_way_others_are_the_alternative():
    rows = [row("ours", 1, 100.0, fused=True), row("theirs", 1, 150.0), row("slow", 1, 160.0)]
    (found,) = advice(rows, {"ours"}, others={"ours", "theirs", "slow"})
    assert (found.best, found.instead_of, found.ties) == ("ours", "theirs", ())
    (found,) = advice(rows, {"ours", "slow"}, others={"ours", "theirs", "slow"})
    assert found.instead_of == "slow"


def test_samplers_of_truncated_problems_are_compared_with_the_next():
    rows = [row(name, 1, us, kind="truncated", top_k=50) for name, us in (("a", 2.0), ("b", 1.0))]
    (found,) = advice(rows)
    assert (found.best, found.instead_of) == ("b", "a")


def run(*arguments):
    return CliRunner().invoke(app, ["recommend", *map(str, arguments)], catch_exceptions=False)


SOME = [*("models-20261123", "paper-20261123", "lean-20261123", "sweep-20261123")]
SOME += [*("truncated-grid-20261122", "tp-20261122", "screened-d4096-20261123")]
READ = [word for name in SOME for word in ("--results", RESULTS / name)]


def facts(*arguments):
    return json.loads(run(*READ, *arguments, "--json").stdout)


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
    found = facts("--model", "qwen3-8b", "--batch", "64", "--needs", "penalties")
    assert list(found["elsewhere"]) == ["flash_sampling_topk_topp"]
    filters = ("--top-k", "50", "--top-p", "0.9")
    found = facts("--model", "qwen3-8b", "--batch", "64", "--needs", "penalties", *filters)
    assert found["elsewhere"] == {}
    assert found["advice"][0]["best"] == "flash_sampling_topk_topp"
    assert facts("--model", "qwen3-8b", *filters)["elsewhere"] == {}


def test_the_latest_run_counts_whatever_its_name(tmp_path):
    both = [row("flash_sampling", 1, 100.0, fused=True), row("gumbel_argmax", 1, 150.0)]
    written(tmp_path / "a", both, utc="2026-02-01T00:00:00+00:00", git_sha="1234567890")
    written(tmp_path / "b", [{**each, "median_us": 2 * each["median_us"]} for each in both])
    done = run("--results", tmp_path, "--model", "qwen3-8b")
    assert "run a: a, 2026-02-01 00:00 UTC, commit 1234567\n" in done.stdout
    assert " 100.0 " in done.stdout and " 200.0" not in done.stdout


def test_needs_rule_samplers_out_and_say_so():
    found = facts("--model", "qwen3-8b", "--needs", "logprob, seed")
    assert found["cannot"]["flashinfer_gumbel"] == ["logprob", "per_request_seed"]
    assert "flash_sampling" not in found["cannot"]
    assert {each["instead_of"] for each in found["advice"]} == {"gumbel_argmax"}
    assert all(each["instead_us"] for each in found["advice"])
    assert found["unmeasured"] == f"{256 - len(found['advice'])} of these 256 batch sizes"
    for call in found["calls"].values():
        assert "flash_sample(" in call["python"] and "return_logprob=True" in call["python"]
    printed = run(*READ, "--model", "qwen3-8b", "--needs", "logprob").stdout
    printed = " ".join(printed.split())
    assert "gumbel_argmax* " in printed and "without logprob" in printed
    assert "not considered (*: only to compare with): " in printed
    assert "No time is with --needs" in printed
    assert "--needs" not in run(*READ, "--model", "qwen3-8b").stdout


@pytest.mark.parametrize(
    ("options", "python", "vllm"),
    [
        (["--top-k", 50, "--top-p", 0.9], "truncated_sample(", "flash_sample vllm serve MODEL"),
        (
            ["--tp", 4],
            "hidden, shard, seed=seed, offset=step, kernel='hopper'",
            "flash_sample vllm serve MODEL --tensor-parallel-size 4",
        ),
        (["--logits", "normal:3"], "screened_sample(hidden, head", "screened vllm serve MODEL"),
        (["--batch", "1"], "offset=step, kernel='hopper'", "flash_sample vllm serve MODEL"),
        (
            ["--batch", "129"],
            "fsbench.kernels.gumbel_argmax import PROVIDER",
            "gumbel_argmax vllm serve MODEL",
        ),
    ],
)
def test_what_to_call(options, python, vllm):
    calls = facts("--model", "qwen3-8b", *options)["calls"].values()
    told = {call["vllm"] for call in calls if python in call["python"]}
    assert told == {f"FSBENCH_VLLM={vllm}"}


def test_a_benchmark_object_without_a_public_call_is_not_advised():
    found = facts("--model", "qwen3-8b", "--top-k", 20, "--batch", 256)
    assert [each["best"] for each in found["advice"]] == ["flash_sampling_topk_topp"]
    assert found["no_public_call"] == {"akunu_exact": [256]}


def test_a_temperature_is_of_the_records_and_of_the_call():
    found = facts("--model", "qwen3-8b", "--temperature", 0.7, "--batch", 4)
    assert found["measure"].endswith("--temperature 0.7")
    assert "offset=step, temperature=0.7" in found["calls"]["flash_sample"]["python"]


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
    assert call["vllm"] == "FSBENCH_VLLM=flash_sample vllm serve MODEL --tensor-parallel-size 2"


def test_without_a_record_the_floor_is_marked():
    found = facts("--model", "qwen3-8b", "--gpu", "h100", "--batch", "1,7")
    floor = iomodel.floor_us(Problem(7, 4096, 151936), "h100")
    assert list(found["floors_us"]) == ["1", "7"] and found["floors_us"]["7"] == floor
    assert found["advice"] == [] and found["sizes"] == []
    printed = run(*READ, "--d", 64, "--v", 1000, "--batch", "3:9").stdout
    assert "this is not a measurement" in printed and "flash_sample(" in printed
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
    assert "vLLM 0" not in done.stdout  # docs/guide/vllm.md says which versions
    assert max(map(len, done.stdout.splitlines())) <= 80
    changes = dict(kind="truncated", top_k=50, top_p=0.9)
    names = ("flash_sampling_topk_topp", "flashinfer_top_k_top_p_lean")
    mine = [row(name, 1, 1.5, **changes) for name in names]
    mine += [row("matmul_only", 1, 1.4, **{**changes, "kind": "lower_bound"})]
    written(tmp_path / "results/own", mine, utc="2099-01-01")
    assert "own, 2099-01-01" in run(*options).stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--model", "qwen3-8b", "--needs", "speed"], InvalidArgument, "--needs: expected one of"),
        (["--model", "qwen3-8b", "--batch", "8:1"], InvalidOption, "--batch: expected a range"),
        (["--model", "qwen3-8b", "--batch", "5"], ResultsError, "results have B = 1, 2, 4, 8"),
        (["--model", "qwen3-8b", "--gpu", "b20"], InvalidArgument, "gpu: expected one of"),
        (["--model", "qwen3-8b", "--gpu", "a100"], InvalidArgument, "mean 'a100-80gb'"),
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
