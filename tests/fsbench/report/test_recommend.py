"""Advice from hand-made rows, and from the committed results through the command line."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch
from cells import results_row
from matplotlib.colors import to_hex
from tree import H200, RESULTS, ROOT, newest
from typer.testing import CliRunner

from fsbench.cli import app, result_frames
from fsbench.discover import discover
from fsbench.errors import InvalidArgument, InvalidOption, ResultsError
from fsbench.problem import Problem
from fsbench.provider import Kind
from fsbench.records import iomodel
from fsbench.records.store import read_environment
from fsbench.records.summary import read_csv
from fsbench.report import logits_store
from fsbench.report.figures import winners
from fsbench.report.figures.style import styles
from fsbench.report.recommend import recommend
from fsbench.report.tables import configurations, families


def row(provider, b, median, spread=0.01, **changes):
    return results_row(provider, b, median, spread, **{"label": provider.title(), **changes})


def fused(provider, b, median, **changes):
    return row(provider, b, median, fused=True, **changes)


def advice(rows, candidates=None, **options):
    (configuration,) = configurations(pd.DataFrame(rows))
    names = {each["provider"] for each in rows if each["kind"] not in ("lower_bound", "greedy")}
    return recommend(configuration, names if candidates is None else candidates, **options)


OURS, THEIRS, SLOW = fused("ours", 1, 100.0), row("theirs", 1, 150.0), row("slow", 1, 160.0)
STORED = logits_store.pair()[1]
FILTERED = dict(kind="truncated", top_k=50)


@pytest.mark.parametrize(
    ("rows", "options", "best", "alternative", "ties"),
    [
        ([OURS, THEIRS, SLOW, row("floor", 1, 9.0, kind="lower_bound")], {}, "ours", "theirs", ()),
        ([fused("ours", 1, 300.0), THEIRS, SLOW], {}, "theirs", "ours", ()),
        ([OURS, THEIRS, SLOW, row("greedy", 1, 9.0, kind="greedy")], {}, "ours", "theirs", ()),
        ([OURS, THEIRS, SLOW], {"candidates": {"theirs", "slow"}}, "theirs", None, ()),
        (
            [OURS, THEIRS, SLOW],
            {"candidates": {"ours"}, "others": {"ours", "theirs", "slow"}},
            *("ours", "theirs", ()),
        ),
        (
            [OURS, THEIRS, SLOW],
            {"candidates": {"ours", "slow"}, "others": {"ours", "theirs", "slow"}},
            *("ours", "slow", ()),
        ),
        ([OURS, fused(STORED, 1, 101.0), THEIRS], {}, "ours", "theirs", ()),
        ([OURS, fused("close", 1, 101.0), row("clear", 1, 120.0)], {}, "ours", "clear", ("close",)),
        ([row("a", 1, 2.0, **FILTERED), row("b", 1, 1.0, **FILTERED)], {}, "b", "a", ()),
    ],
)
def test_the_fastest_candidate_and_the_best_of_the_other_approach(
    rows, options, best, alternative, ties
):
    (result,) = advice(rows, **options)
    assert (result.best, result.instead_of, result.ties) == (best, alternative, ties)
    times = {each["provider"]: each["median_us"] for each in rows}
    assert (result.us, result.instead_us) == (times[best], times.get(alternative))


def test_without_a_candidate_there_is_no_advice():
    assert advice([OURS, THEIRS], {"another"}) == [] == advice([fused(STORED, 1, 100.0)])


def test_memory_is_reported():
    rows = [
        *(fused("copying", b, 100.0, peak_extra_bytes=5e9) for b in (1, 8)),
        fused("ours", 1, 200.0, peak_extra_bytes=1e6),
        fused("ours", 8, 200.0, peak_extra_bytes=None),
        row("theirs", 1, 300.0, peak_extra_bytes=2e9),
    ]
    assert [(each.best, each.extra_bytes) for each in advice(rows)] == [
        ("copying", 5_000_000_000)
    ] * 2
    others = [each for each in rows if each["provider"] != "copying"]
    assert [each.extra_bytes for each in advice(others)] == [1_000_000, None]


def test_the_run_is_that_with_the_strongest_alternative():
    """A later run that lacks the strongest sampler of one approach would overstate the gain."""
    rows = [
        *(row("floor", 1, 95.0, kind="lower_bound", folder=f"run{n}") for n in (1, 2, 3, 4)),
        *(fused("ours", 1, 100.0), row("lean", 1, 120.0)),
        *(fused("ours", 1, 101.0, folder="run2"), row("lean", 1, 118.0, folder="run2")),
        *(fused("ours", 1, 90.0, folder="run3"), row("theirs", 1, 150.0, folder="run3")),
        *(fused("weaker", 1, 117.0, folder="run4"), row("lean", 1, 118.0, folder="run4")),
        fused("ours", 8, 90.0, folder="run3"),
    ]
    result, alone = advice(rows)
    assert (result.folder, result.best, result.us) == ("run2", "ours", 101)
    assert (result.instead_of, result.instead_us) == ("lean", 118)
    assert (alone.folder, alone.instead_of) == ("run3", None)


def test_the_public_call_replaces_samplers_that_force_its_kernels():
    rows = [fused("portable", 1, 110.0), fused("hopper", 1, 99.0), THEIRS]
    forced = {"portable": "call", "hopper": "call"}
    (result,) = advice(rows, forced=forced)
    assert result.best == "hopper"
    (result,) = advice([*rows, fused("call", 1, 101.0)], forced=forced)
    assert (result.best, result.us, result.instead_of) == ("call", 101, "theirs")
    elsewhere = [fused("call", 1, 101.0, folder="run2"), row("slow", 1, 190.0, folder="run2")]
    (result,) = advice([*rows, *elsewhere], forced=forced)
    assert (result.best, result.instead_of) == ("hopper", "theirs")


def test_a_sampler_without_a_graph_is_neither_advised_nor_compared_with():
    rows = [OURS, THEIRS, fused("hosted", 1, 90.0, graph=False), row("slow", 1, 95.0, graph=False)]
    (result,) = advice(rows)
    assert (result.best, result.instead_of) == ("ours", "theirs")


def test_figures_and_advice_know_the_same_samplers_that_force_a_kernel():
    samplers = {n: entry.provider for n, entry in discover().items() if entry.provider}
    kernels = {
        n: getattr(each.sample, "keywords", {}).get("kernel") for n, each in samplers.items()
    }
    (call,) = (n for n, kernel in kernels.items() if kernel == "auto")
    forced = (n for n, kernel in kernels.items() if kernel not in (None, "auto"))
    assert dict.fromkeys(forced, call) == winners.FORCED


@pytest.fixture(scope="module")
def run():
    """Call `fsbench recommend`; each set of results is read once."""

    def call(*arguments):
        return CliRunner().invoke(app, ["recommend", *map(str, arguments)], catch_exceptions=False)

    original = result_frames.read_results
    read = cache(lambda folders: original([*folders]))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(result_frames, "read_results", lambda folders: read(tuple(folders)))
        yield call


SOME = ("paper", "lean", "tp", "screened-d4096")
READ = [word for name in SOME for word in ("--results", newest(name))]
READ_FILTERS = ["--results", newest("truncated-grid")]


@pytest.fixture(scope="module")
def facts(run):
    def call(*arguments, read=READ):
        return json.loads(run(*read, "--model", "qwen3-8b", *arguments, "--json").stdout)

    return call


def written(folder, rows, **environment):
    folder.mkdir(parents=True)
    (folder / "env.json").write_text(json.dumps({"schema": 1, "utc": "2026-01-01", **environment}))
    pd.DataFrame(rows).drop(columns="folder").to_csv(folder / "results.csv", index=False)
    return folder


def test_every_number_from_the_committed_results_is_in_a_record(facts):
    result = facts("--batch", "1,64,100")
    assert [each["b"] for each in result["advice"]] == [1, 64]
    for each in result["advice"]:
        cells = pd.read_csv(Path(each["folder"]) / "results.csv").query("b == @each['b']")
        cells = cells[(cells.d == 4096) & (cells.v == 151936) & cells.graph]
        times = cells.set_index("provider").median_us
        assert times[each["best"]] == pytest.approx(each["us"], rel=1e-5)  # the CSV has 6 digits
        assert times[each["instead_of"]] == pytest.approx(each["instead_us"], rel=1e-5)
        assert each["instead_us"] > each["us"]
        environment = read_environment(Path(each["folder"]))
        expected = {name: environment[name] for name in ("utc", "git_sha", "triton")}
        assert result["runs"][each["folder"]] == expected
        assert each["best"] == "flash_sampling_auto"  # not one of the kernels that it chooses
    assert result["unmeasured"] == "B = 100"
    assert result["cannot"] == {}


def test_the_latest_run_counts_whatever_its_name(run, tmp_path):
    both = [fused("flash_sampling", 1, 100.0), row("gumbel_argmax", 1, 150.0)]
    written(
        tmp_path / "a", both, utc="2026-02-01T00:00+00:00", git_sha="1234567890", triton="3.9.0"
    )
    written(tmp_path / "b", [{**each, "median_us": 2 * each["median_us"]} for each in both])
    printed = run("--results", tmp_path, "--d", 4096, "--v", 151936).stdout
    assert "run a: a, 2026-02-01 00:00 UTC, commit 1234567, Triton 3.9.0\n" in printed
    assert " 100.0 " in printed and " 200.0" not in printed


def test_needs_rule_samplers_out_and_the_reason_is_printed(facts, run):
    result = facts("--needs", "logprob, seed")
    assert result["cannot"]["flashinfer_gumbel"] == ["logprob", "per_request_seed"]
    assert "flash_sampling" not in result["cannot"]
    assert {each["instead_of"] for each in result["advice"]} == {"gumbel_argmax"}
    assert result["unmeasured"] == f"{256 - len(result['advice'])} of these 256 batch sizes"
    for call in result["calls"].values():
        assert "flash_sample(" in call["python"] and "return_logprob=True" in call["python"]
    printed = run(*READ, "--model", "qwen3-8b", "--needs", "logprob").stdout
    printed = " ".join(printed.split())
    assert "gumbel_argmax* " in printed and "without logprob" in printed
    assert "not considered (*: only to compare with): " in printed
    assert "No time is with --needs" in printed


@pytest.mark.parametrize(
    ("options", "python", "vllm"),
    [
        (
            ["--tp", 4],
            "hidden, shard, seed=seed, offset=step)",
            "flash_sample vllm serve MODEL --tensor-parallel-size 4",
        ),
        (["--logits", "normal:3"], "screened_sample(hidden, head", "screened vllm serve MODEL"),
        (["--batch", "1"], "weight, seed=seed, offset=step)", "flash_sample vllm serve MODEL"),
    ],
)
def test_what_to_call(facts, options, python, vllm):
    calls = facts(*options)["calls"].values()
    lines = {call["vllm"] for call in calls if python in call["python"]}
    assert lines == {f"FSBENCH_VLLM={vllm}"}


def test_several_gpus_are_compared_with_the_fastest_sampler_that_stores_logits(facts):
    times = pd.read_csv(newest("tp") / "results.csv").query("d == 4096 and tp == 4")
    stored = times[~times.fused & (times.kind == "exact")].groupby("b").median_us.min()
    advice = facts("--tp", 4)["advice"]
    assert {each["instead_of"] for each in advice} == {"gumbel_argmax"}
    compared = {each["b"]: each["instead_us"] for each in advice}
    assert compared == pytest.approx(stored.to_dict(), rel=1e-5)


def test_filters(facts):
    """Advice, code, and samplers without a public call."""
    result = facts("--top-k", 20, "--batch", 256, read=READ_FILTERS)
    assert [each["best"] for each in result["advice"]] == ["flash_sampling_topk_topp"]
    assert result["no_public_call"] == {"akunu_exact": [256]}
    (call,) = result["calls"].values()
    assert "truncated_sample(" in call["python"]
    assert call["vllm"] == "FSBENCH_VLLM=flash_sample vllm serve MODEL"
    filters = ("--top-k", 50, "--top-p", 0.9, "--batch", 64, "--needs", "penalties")
    result = facts(*filters, read=READ_FILTERS)
    assert result["advice"][0]["best"] == "flash_sampling_topk_topp"


def test_code_for_other_shapes(run, tmp_path):
    written(tmp_path / "a", [row("flash_sampling_screened", 1, 100.0, tp=2)])
    options = ["--results", tmp_path, "--model", "qwen3-8b", "--batch", 1, "--json"]
    (call,) = json.loads(run(*options, "--tp", 2).stdout)["calls"].values()
    assert call["python"].splitlines() == [
        "from fsbench.kernels import VocabShard, prepare_head, screened_sample",
        "shard = VocabShard(weight_rows_of_this_rank, group)  # once, on all ranks",
        "head = prepare_head(shard.weight)  # once",
        "sample = screened_sample(hidden, head, shard=shard, seed=seed, offset=step)",
    ]
    assert call["vllm"] == "FSBENCH_VLLM=flash_sample vllm serve MODEL --tensor-parallel-size 2"
    written(tmp_path / "b", [row("gumbel_argmax", 1, 100.0)])
    (call,) = json.loads(run(*options).stdout)["calls"].values()
    assert "fsbench.kernels.gumbel_argmax import PROVIDER" in call["python"]
    assert call["vllm"] == "FSBENCH_VLLM=gumbel_argmax vllm serve MODEL"


def test_without_a_record_the_floor_is_printed(facts, run):
    result = facts("--gpu", "h100", "--batch", "1,7")
    floor = iomodel.floor_us(Problem(7, 4096, 151936), "h100")
    assert list(result["floors_us"]) == ["1", "7"] and result["floors_us"]["7"] == floor
    assert result["advice"] == [] and result["sizes"] == []
    printed = run(*READ, "--d", 64, "--v", 1000, "--batch", "3:9").stdout
    assert "this is not a measurement" in printed and "flash_sample(" in printed
    assert "fsbench run --device cuda --d 64 --v 1000 --dtype bf16" in " ".join(printed.split())
    result = facts("--temperature", 0.7, "--batch", 4, "--logits", "zipf:2")
    assert result["measure"].endswith("--temperature 0.7 --logits zipf:2")
    assert "offset=step, temperature=0.7" in result["calls"]["flash_sample"]["python"]


def test_a_cpu_after_make_bench(run, tmp_path):
    changes = dict(device="cpu", gpu="", graph=False, timer="cpu", l2="", dtype="fp32", d=2048)
    written(tmp_path / "run", [row("multinomial", 4, 9000.0, **changes)])
    options = ["--results", tmp_path, "--gpu", "cpu"]
    assert "9000.0" in run(*options, "--model", "qwen3-1.7b").stdout
    result = json.loads(run(*options, "--d", 2048, "--v", 151_936, "--json").stdout)
    names = dict(B=4, weight=torch.randn(500, 2048), hidden=torch.randn(4, 2048), seed=0, step=0)
    exec(result["calls"]["multinomial"]["python"], names)
    assert names["tokens"].shape == (4,) and names["problem"].device == "cpu"
    with pytest.raises(ResultsError, match="fsbench run --device cpu --d 4096"):
        run(*options, "--model", "qwen3-8b")


def test_it_works_anywhere_and_fits_80_columns(run, tmp_path, monkeypatch):
    """Without --results: those that come with fsbench, and those of the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("fsbench.records.store.shipped_results", lambda: READ_FILTERS[1])
    options = ["--model", "qwen3-8b", "--top-k", 50, "--top-p", 0.9]
    (tmp_path / "results/cpu/e2e").mkdir(parents=True)  # of a command that times no sampler
    printed = run(*options).stdout
    assert "flash_sampling_topk_topp" in printed
    assert "vLLM 0" not in printed  # docs/guide/vllm.md says which versions
    assert max(map(len, printed.splitlines())) <= 80
    changes = dict(kind="truncated", top_k=50, top_p=0.9)
    names = ("flash_sampling_topk_topp", "flashinfer_top_k_top_p_lean")
    rows = [row(name, 1, 1.5, **changes) for name in names]
    rows += [row("matmul_only", 1, 1.4, **{**changes, "kind": "lower_bound"})]
    written(tmp_path / "results/new", rows, utc="2099-01-01")
    assert "new, 2099-01-01" in run(*options).stdout


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--model", "qwen3-8b", "--needs", "speed"], InvalidArgument, "--needs: expected one of"),
        (["--model", "qwen3-8b", "--batch", "8:1"], InvalidOption, "--batch: expected a range"),
        (["--model", "qwen3-8b", "--batch", "5"], ResultsError, "results have B = 1, 2, 4, 8"),
        (["--model", "qwen3-8b", "--gpu", "b20"], InvalidArgument, "gpu: expected one of"),
        (["--model", "qwen3-8b", "--gpu", "a100"], InvalidArgument, "mean 'a100-80gb'"),
        (["--model", "phi-4", "--tp", "2", "--top-k", "9"], ResultsError, "runs on one GPU"),
        ([], InvalidArgument, "--model: expected a model, or --d and --v; got neither"),
        (["--model", "phi-4", "--v", "9"], InvalidArgument, "got --model phi-4 --v 9"),
    ],
)
def test_refusals(run, arguments, error, message):
    with pytest.raises(error, match=message):
        run("--results", newest("paper"), *arguments)


def test_a_declared_deviation_is_printed(run, tmp_path):
    rows = [row("flashinfer_gumbel", 1, 100.0), fused("flash_sampling", 1, 150.0)]
    printed = run("--results", written(tmp_path / "run", rows), "--model", "qwen3-8b").stdout
    assert "not exact:" in printed and "drawn too rarely" in " ".join(printed.split())


@pytest.fixture(scope="module")
def recorded():
    folders = result_frames.by_time([H200, RESULTS / "h100"])
    whole = (read_csv(each) for each in folders if (each / "results.csv").exists())
    return pd.concat(whole, ignore_index=True)


@pytest.mark.full
@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_advice_is_what_the_figure_of_winners_shows(recorded, gpu):
    """Advice from the runs of the figure saves what the figure prints, to its rounding."""
    (line,) = re.findall(r"call RUNS,(.*)\) --figure winner", (ROOT / "Makefile").read_text())
    names = "|".join(line.split())
    shown = recorded[recorded.folder.str.contains(rf"/{gpu}/(?:{names})-2\d+$")]
    every = {_key(each): each for each in configurations(shown[shown.top_k.fillna(0) == 0])}
    cells = 0
    for family in families(configurations(shown)).values():
        family = [each for each in family if each.drawn is Kind.EXACT]
        if (figure := winners.draw(family, styles(shown))) is None:
            continue
        axes = figure.axes[0]
        batches = [int(label.get_text()) for label in axes.get_xticklabels()]
        heads = sorted(family, key=lambda each: tuple(each.rows[["d", "v"]].iloc[0]))
        whole = [every[_key(head)] for head in heads]
        expected = [
            {
                one.b: one
                for one in recommend(each, each.providers(Kind.EXACT), forced=winners.FORCED)
            }
            for each in whole
        ]
        for text, patch in zip(axes.texts, axes.patches, strict=True):
            x, y = text.get_position()
            one = expected[y][batches[x]]
            assert abs(float(text.get_text().rstrip("%*")) / 100 - one.saves) < 0.0051
            is_fused = one.best in whole[y].providers(Kind.EXACT, fused=True)
            color = winners.FUSED if is_fused else winners.STORED
            assert to_hex(patch.get_facecolor()) in {color, winners.NOISE}
            cells += 1
    assert cells > 40


def _key(configuration):
    first = configuration.rows.iloc[0]
    return first.gpu, first.d, first.v, configuration.conditions
