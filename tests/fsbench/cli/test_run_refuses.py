"""Mistakes that `fsbench run` refuses: exit codes, and one line that names the mistake."""

from __future__ import annotations

import subprocess
import sys

import pandas as pd
import pytest
from tiny_run import TINY

from fsbench import cli
from fsbench.machine import hardware
from fsbench.records.store import read_records


def test_a_failed_check_exits_1_and_is_not_timed(fsbench, plugin, tmp_path):
    wrong = plugin(draw="argmax(1) * 0")
    others = ["--provider", "matmul_only", "--check"]
    code, out, _ = fsbench("run", *TINY, *wrong, *others, "--out", "x")
    assert code == 1
    assert "mine: check_failed (all 2 cells): greedy: " in out
    table = pd.read_csv(tmp_path / "x" / "results.csv").set_index("provider")
    assert table.loc["mine", "median_us"].isna().all()
    # The user may insist.
    assert fsbench("run", *TINY, *wrong, "--out", "y")[0] == 0


def test_failed_cells_exit_3(fsbench, plugin):
    failing = plugin(launch="1 // 0")
    code, out, _ = fsbench("run", *TINY, *failing, "--out", "x")
    assert code == 3
    assert "mine: error (all 2 cells): ZeroDivisionError" in out


def test_a_weight_too_large_for_memory_is_oom_and_exits_3(fsbench, tmp_path):
    huge = ["--d", "100000000", "--v", "100000000", "--batch", "1"]
    code, out, _ = fsbench("run", *TINY, *huge, "--provider", "matmul_only", "--out", "x")
    assert code == 3
    (record,) = read_records(tmp_path / "x")
    assert record.status == "oom" and "oom (all 1 cells)" in out


MISTAKES = {
    "--provider multinomal": "--provider: expected a name ...; did you mean 'multinomial'?",
    "--model qwen3_8b": "--model: expected a name ...; did you mean 'qwen3-8b'?",
    "--preset papper": "--preset: expected one of ...; did you mean 'paper'?",
    "--d 64": "--v: expected together with --d; got only --d",
    "--iters 2 --rounds 5": "--iters: expected at least one step ... --rounds 5; got 2",
    "--mixed": "--mixed: expected with --top-k, --top-p or --min-p",
    "--history 5": "--history: expected with a penalty",
    "--out a --resume b": "b is not a results folder: it has no env.json",
    "--resume x --gpu 0,1": "x is not a results folder: it has no env.json",
}
"""What the grid of test_bad_arguments.py has not: what a line says, and options together."""


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(fsbench, tmp_path, arguments):
    words = arguments.split(" ")
    device = [] if "--device" in words else ["--device", "cpu"]
    code, out, err = fsbench("run", *device, *words)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    start, *parts = MISTAKES[arguments].split("...")
    assert line.startswith(f"error: {start}")
    assert all(part in line for part in parts)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--device cpu --timer cupti", "timer cupti: needs a CUDA device, got device cpu; use cpu"),
        ("--device cpu --timer events", "timer events: needs a CUDA device, got device cpu"),
        ("--device cuda", "--device cuda: NVML sees no GPU; `fsbench doctor` says why"),
    ],
)
def test_a_missing_device_or_timer_exits_4(fsbench, tmp_path, monkeypatch, arguments, line):
    monkeypatch.setattr(hardware, "gpus", lambda: [])
    monkeypatch.setattr(hardware, "nvml_problem", lambda: None)
    code, out, err = fsbench("run", "--preset", "smoke", *arguments.split())
    assert (code, out) == (4, "")
    assert err.startswith(f"error: {line}") and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_exits_4_before_any_is_measured(fsbench, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = hardware.Gpu(0, "NVIDIA H200", "GPU-0", 2**37, "580", (9, 0))
    monkeypatch.setattr(hardware, "gpus", lambda: [gpu])
    code, _, err = fsbench("run", "--gpu", "0,7", "--timer", "fake")
    assert code == 4 and err.endswith("error: --gpu: expected indices below 2; got 7\n")
    assert list(tmp_path.iterdir()) == []


def test_out_and_resume_together_are_refused(fsbench):
    fsbench("run", "--preset", "smoke", *TINY, "--out", "x")
    code, _, err = fsbench("run", "--resume", "x", "--out", "y")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--out: expected without --resume" in err
    code, _, err = fsbench("run", "--resume", "x", "--gpu", "0,1")
    assert (code, "--gpu: expected one index with --resume; got '0,1'" in err) == (2, True)


def test_out_on_results_is_refused_and_they_stay_as_they_are(fsbench, tmp_path):
    fsbench("run", "--preset", "smoke", *TINY, "--out", "x")
    before = {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}
    code, _, err = fsbench("run", "--preset", "smoke", *TINY, "--out", "x")
    assert code == 2 and "x already holds results; use --resume x or another --out" in err
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "x").iterdir()}


def test_every_option_has_help():
    import typer

    for name, command in typer.main.get_command(cli.app).commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"


def test_version(fsbench):
    import fsbench as package

    assert fsbench("--version") == (0, f"{package.__version__}\n", "")


def test_a_sampler_that_cannot_run_here_leaves_no_folder(fsbench, tmp_path):
    code, out, err = fsbench("run", "--device", "cpu", "--provider", "flash_sampling")
    assert (code, out) == (4, "")
    assert err.startswith("error: no sampler can run here: flash_sampling: runs on cuda only")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--model", "qwen3-9b"], ["--provider", "multinomal"]])
def test_an_unknown_name_is_refused_before_torch_is_imported(tmp_path, arguments):
    code = "from fsbench.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    start = f"import sys; sys.argv = ['fsbench', 'run', *{arguments}]\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert "did you mean" in done.stderr and "`fsbench list`" in done.stderr
    assert len(done.stderr) < 160
