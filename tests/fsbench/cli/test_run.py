"""`fsbench run` from the outside: what it measures, writes and prints."""

from __future__ import annotations

import shutil

import pandas as pd
from cells import results_row
from plug_in import plug_in
from tiny_run import TINY

from fsbench.discover import discover
from fsbench.records.store import read_environment, read_records

SMOKE = sum("smoke" in entry.provider.presets for entry in discover().values())
"""How many samplers the preset has."""


def test_filters_are_a_grid_and_columns_of_the_results(fsbench, tmp_path):
    options = ["--top-k", "5,0", "--top-p", "0.5,1", "--batch", "3", "--out", "here", "--mixed"]
    names = ("--provider", "matmul_only", "--provider", "multinomial")
    code, out, err = fsbench("run", *TINY, *names, *options)
    assert code == 0, err
    table = pd.read_csv(tmp_path / "here" / "results.csv").set_index("provider")
    columns = table.loc["matmul_only", ["top_k", "top_p", "min_p", "mixed"]]
    result = list(columns.itertuples(index=False, name=None))
    (refused, *_) = table.loc["multinomial"].itertuples(index=False)
    assert (refused.status, refused.reason) == ("unsupported", "does not apply top_k, top_p")
    assert result == [(5, 0.5, 0, True), (5, 1, 0, True), (0, 0.5, 0, True), (0, 1, 0, False)]
    assert "top-k 5, top-p 0.5, mixed rows" in out


def test_scores_are_measured_checked_and_compared(fsbench, tmp_path):
    source = plug_in(kind="SCORE", zero=False, draw="float().log_softmax(1)[:, 0]")
    (tmp_path / "mine.py").write_text(source)
    names = ("score_log_softmax", "score_chunked", "matmul_only", "mine")
    providers = [word for name in names for word in ("--provider", name)]
    options = ["--provider-path", "mine.py", "--batch", "3", "--out", "here", "--check"]
    code, _, err = fsbench("run", *TINY, *providers, *options)
    assert code == 1, err
    table = pd.read_csv(tmp_path / "here" / "results.csv").set_index("provider")
    assert table.status.to_dict() == {
        "score_log_softmax": "ok",
        "score_chunked": "ok",
        "matmul_only": "ok",
        "mine": "check_failed",
    }
    assert set(table.kind) == {"score", "lower_bound"}
    assert "log-probability: row 0: expected" in table.reason["mine"]
    assert "## log_softmax and gather (eager)" in next(tmp_path.glob("here/*.md")).read_text()
    for command in (["plot", "--figure", "runtime"], ["report"]):
        code, _, err = fsbench(*command, "here", "--out", command[0])
        assert code == 0, err
    assert "runtime" in (tmp_path / "report" / "cpu.html").read_text()


def test_scores_refuse_what_has_no_meaning_for_them(fsbench, tmp_path):
    for options, reason in (
        (["--top-k", "5"], "does not apply top_k"),
        (["--temperature", "0"], "does not take temperature 0 (greedy)"),
    ):
        fsbench("run", *TINY, "--provider", "score_chunked", *options, "--batch", "3", "--out", "x")
        (output,) = pd.read_csv(tmp_path / "x" / "results.csv").reason
        assert output == reason
        shutil.rmtree(tmp_path / "x")


def test_penalties_are_columns_of_the_results_and_applied(fsbench, tmp_path):
    options = ["--top-k", "5", "--repetition-penalty", "1.3", "--presence-penalty", "0.5"]
    options += ["--history", "40", "--batch", "3", "--out", "here", "--check"]
    names = ["sort_top_k_top_p", "multinomial", "matmul_only"]
    providers = [word for name in names for word in ("--provider", name)]
    fsbench("run", *TINY, *providers, *options)
    table = pd.read_csv(tmp_path / "here" / "results.csv").set_index("provider")
    assert table.status.to_dict() == {
        "sort_top_k_top_p": "ok",
        "multinomial": "unsupported",
        "matmul_only": "ok",
    }
    assert set(table.repetition_penalty) == {1.3} and set(table.history) == {40}
    assert set(table.presence_penalty) == {0.5} and set(table.frequency_penalty) == {0.0}
    code, out, _ = fsbench("run", *TINY, "--provider", "multinomial", *options[2:4], "--dry-run")
    assert code == 0 and "history=1024" in out


def test_a_quantized_head_is_a_column_of_the_results(fsbench, tmp_path):
    options = ["--weights", "int8", "--batch", "3", "--out", "here", "--check"]
    names = ["multinomial", "scaled_matmul", "matmul_only"]
    providers = [word for name in names for word in ("--provider", name)]
    code, out, err = fsbench("run", *TINY, *providers, *options)
    table = pd.read_csv(tmp_path / "here" / "results.csv").set_index("provider")
    assert table.status.to_dict() == {
        "scaled_matmul": "unavailable",
        "multinomial": "ok",
        "matmul_only": "ok",
    }, err
    assert set(table.weights) == {"int8"} and "int8 head" in out
    assert next(iter(read_records(tmp_path / "here"))).cell.problem.weights == "int8"
    code, out, _ = fsbench("run", "--resume", "here", "--dry-run")
    assert code == 0 and "int8 weights" in out


def test_a_run_leaves_points_environment_csv_and_tables(fsbench, tmp_path):
    options = ["--check", "--seed", "3", "--out", "here"]
    code, out, _ = fsbench("run", "--preset", "smoke", *TINY, *options)
    assert code == 0
    folder = tmp_path / "here"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("points.jsonl", "env.json", "results.csv"),
        *("speedup_cpu_d16_v50.csv", "speedup_cpu_d16_v50.md", "breakdown.csv"),
    }
    table = pd.read_csv(folder / "results.csv")
    assert set(table["status"]) == {"ok"} and set(table["n_samples"]) == {4}
    assert set(table["b"]) == {1, 3} and set(table["timer"]) == {"fake"}
    assert set(table["median_us"].between(100, 102)) == {True}
    environment = read_environment(folder)
    assert environment["device"] == "cpu" and environment["argv"][1:3] == ["run", "--preset"]
    assert environment["options"]["seed"] == 3
    assert "Median time, us: CPU, D = 16, V = 50" in out
    assert "Matmul only (lower bound)" in out
    assert "Wrote here/results.csv and 3 tables next to it.\n" in out
    assert " ".join(out.split()).endswith("(B = 1 to 3).")


def test_breakdown_is_printed_and_says_what_it_cannot_class(fsbench, tmp_path):
    options = ["--breakdown", "--out", "here"]
    code, out, _ = fsbench("run", "--preset", "smoke", *TINY, *options)
    assert code == 0
    assert "Time in kernels, us: CPU, D = 16, V = 50" in out
    # The fake timer gives every step 100 us and up to 2 % more, in one kernel.
    fused = next(line for line in out.splitlines() if "difference to greedy form" in line)
    matmul, sampling, other, share = map(float, fused.split()[-8:-4])
    assert 100 <= matmul <= 102 and abs(sampling) <= 2 and other == 0 and abs(share) <= 2
    assert "not classed: fake_kernel of matmul_only, up to 100.0% of its time" in out
    assert "not split: " in out
    forms = pd.read_csv(tmp_path / "here" / "breakdown.csv")["form"]
    assert set(forms.dropna()) == {"greedy"}


def test_energy_needs_a_gpu_and_no_folder_is_made(fsbench, tmp_path):
    code, _, err = fsbench("run", "--preset", "smoke", *TINY, "--energy", "1")
    assert code == 4 and "--energy: needs a GPU" in err
    assert list(tmp_path.iterdir()) == []


def test_sustained_load_is_measured_and_printed_on_a_cpu_too(fsbench, tmp_path):
    options = ["--sustained", "0.5", "--provider", "greedy", "--batch", "1", "--out", "x"]
    code, out, _ = fsbench("run", *TINY, *options)
    assert code == 0 and "Back to back, us per step: CPU, D = 16, V = 50" in out
    (row,) = pd.read_csv(tmp_path / "x" / "results.csv").to_dict("records")
    assert 0 < row["sustained_us"] < 1e6 and pd.isna(row["sustained_joules"])


def test_several_shapes_and_models_make_a_sweep(fsbench):
    several = ["--d", "8,16", "--v", "50,60", "--model", "phi-4,gemma3-1b", "--batch", "1,2"]
    code, out, _ = fsbench("run", "--device", "cpu", "--preset", "smoke", *several, "--dry-run")
    assert code == 0
    assert f"12 problems x {SMOKE} providers" in out
    assert "B=2 D=5120 V=100352 fp32" in out and "B=1 D=8 V=60 fp32" in out


def test_dry_run_prints_the_cells_and_what_is_left_out_and_writes_nothing(fsbench, tmp_path):
    code, out, _ = fsbench("run", "--device", "cpu", "--preset", "paper", "--dry-run")
    assert code == 0
    assert "18 problems x " in out and "25 warm-up and 100 timed steps in 5 rounds" in out
    assert "not weight_stream: unavailable: runs on cuda only" in out.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_run_is_planned_without_a_gpu(fsbench, monkeypatch):
    monkeypatch.setattr("fsbench.machine.hardware.gpus", lambda: [])
    code, out, _ = fsbench(
        "run", "--device", "cuda", "--preset", "lean", "--energy", 1, "--dry-run"
    )
    assert code == 0 and "this machine has no GPU" in out
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    samplers, problems = "".join(lines[2:]).split(":", 1)
    assert "flash_sampling_hopper" in samplers and "flashinfer" in samplers
    assert problems.count("B=256 D=4096 V=151936 bf16") == 1


def test_a_dry_run_tells_apart_what_samplers_can_do(fsbench, monkeypatch):
    monkeypatch.setattr("fsbench.machine.hardware.gpus", lambda: [])
    _, out, _ = fsbench("run", "--device", "cuda", "--preset", "truncated", "--dry-run")
    problems = [line for line in out.splitlines() if line.startswith("  B=")]
    assert len(problems) == len(set(problems)) == 225
    without, with_min_p, *_ = (each.rsplit("B=", 1)[-1] for each in out.split(":\n"))
    assert "flashinfer_joint" in without and "akunu_exact" in with_min_p
    assert "flashinfer_joint" not in with_min_p


def test_few_iterations_need_no_other_option(fsbench):
    code, out, _ = fsbench("run", "--device", "cpu", "--iters", "2", "--dry-run")
    assert code == 0 and "2 timed steps in 2 rounds" in out


def test_options_reach_the_measurement(fsbench, tmp_path):
    options = ["--temperature", "0.5", "--logits", "zipf:1.5", "--batch", "2"]
    assert fsbench("run", "--preset", "smoke", *TINY, *options, "--out", "x")[0] == 0
    for record in read_records(tmp_path / "x"):
        assert (record.cell.problem.temperature, record.cell.problem.logits) == (0.5, "zipf:1.5")
        assert record.cell.problem.B == 2


def test_a_plug_in_given_by_path_is_measured_beside_the_preset(fsbench, plugin, tmp_path):
    path_only = plugin()[:2]
    assert fsbench("run", "--preset", "smoke", *TINY, *path_only, "--out", "x")[0] == 0
    measured = {r.cell.provider: r.status for r in read_records(tmp_path / "x")}
    assert measured["mine"] == "ok" and len(measured) == SMOKE + 1


def test_a_broken_plug_in_is_a_row_and_the_others_are_measured(fsbench, plugin, tmp_path):
    broken = plugin("broken", "raise RuntimeError('no luck')")
    fine = ["--provider", "greedy"]
    code, out, _ = fsbench("run", *TINY, *broken, *fine, "--out", "x")
    assert code == 0
    table = pd.read_csv(tmp_path / "x" / "results.csv").set_index("provider")
    assert set(table.loc["broken", "status"]) == {"unavailable"}
    assert set(table.loc["broken", "reason"]) == {"RuntimeError: no luck"}
    assert set(table.loc["greedy", "status"]) == {"ok"}
    assert "broken: unavailable (all 2 cells): RuntimeError: no luck" in out
    # Alone, it leaves no folder.
    code, _, err = fsbench("run", *TINY, *broken, "--out", "y")
    assert (code, (tmp_path / "y").exists()) == (4, False)
    assert err.startswith("error: no sampler can run here: broken: RuntimeError: no luck")


def test_the_summary_fits_80_columns_and_does_not_mix_conditions(fsbench, tmp_path):
    batches = ["--batch", "1,2,4,8,16,32,64,128,256"]
    arguments = ["run", "--preset", "smoke", *TINY, *batches]
    _, out, _ = fsbench(*arguments, "--out", "x")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    _, out, _ = fsbench("run", "--resume", "x", "--temperature", "0.5")
    assert out.count("Median time, us") == 2 and "T = 0.5" in out and "T = 1," in out


def test_energy_is_printed_by_sampler_and_batch(capsys):
    from fsbench.cli.run_output import print_energy

    table = [
        results_row(name, b, 1.0, label=name, idle_w=88.4, j_per_token=joules)
        for name, b, joules in (("a", 1, 0.21), ("a", 2, 0.1), ("b", 1, 0.3), ("c", 1, None))
    ]
    print_energy(pd.DataFrame(table))
    lines = capsys.readouterr().out.splitlines()
    assert "of the whole GPU, which draws 88 W when idle" in lines
    assert [line.split() for line in lines[-2:]] == [["a", "210.0", "100.0"], ["b", "300.0", "-"]]
