"""`fsbench run` from the outside: what users type, what they get wrong, and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pandas as pd
import pytest

from fsbench import cli
from fsbench.records.store import read_environment, read_records

PLUGIN = '''
"""A sampler that is right, and takes its time."""

import time

from fsbench.provider import Capabilities, Kind, Provider


def build(problem, weight):
    def launch(hidden, seed, offset):
        time.sleep({pause})
        return (hidden @ weight.T).argmax(1){wrong}

    return launch


PROVIDER = Provider(
    name="{name}",
    label="Plug-in {name}",
    kind=Kind.{kind},
    build=build,
    capabilities=Capabilities(devices=("cpu",), dtypes=("fp32",), zero_temperature=True),
)
'''


@pytest.fixture
def plugin(tmp_path):
    """Writes a greedy sampler of this name; returns the options that name its file."""

    def write(name="mine", text=PLUGIN, kind="GREEDY", pause=0, wrong=""):
        path = tmp_path / f"{name}.py"
        path.write_text(text.format(name=name, kind=kind, pause=pause, wrong=wrong))
        return ["--provider-path", str(path), "--provider", name]

    return write


@pytest.fixture
def fsbench(monkeypatch, capsys, tmp_path):
    """Calls the console script in a folder of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fsbench", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call


TINY = ["--device", "cpu", "--d", "16", "--v", "50", "--batch", "1,3", "--dtype", "fp32"]
TINY += ["--timer", "fake", "--warmup", "0", "--iters", "4", "--rounds", "2", "--no-check"]


# What it writes and prints


def test_filters_are_a_grid_and_columns_of_the_results(fsbench, tmp_path):
    options = ["--top-k", "5,0", "--top-p", "0.5,1", "--batch", "3", "--out", "here", "--mixed"]
    code, out, err = fsbench("run", *TINY, "--provider", "matmul_only", *options)
    assert code == 0, err
    table = pd.read_csv(tmp_path / "here" / "results.csv")
    found = list(table[["top_k", "top_p", "min_p", "mixed"]].itertuples(index=False, name=None))
    assert found == [(5, 0.5, 0, True), (5, 1, 0, True), (0, 0.5, 0, True), (0, 1, 0, False)]
    assert "top-k 5, top-p 0.5, mixed rows" in out


def test_samplers_without_filters_say_so(fsbench, tmp_path):
    options = ["--top-k", "5", "--batch", "3", "--out", "here"]
    fsbench("run", *TINY, "--provider", "multinomial", "--provider", "matmul_only", *options)
    table = pd.read_csv(tmp_path / "here" / "results.csv").set_index("provider")
    assert table.status.to_dict() == {"multinomial": "unsupported", "matmul_only": "ok"}
    assert table.reason["multinomial"] == "does not apply top_k"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mixed"], "--mixed: expected with --top-k, --top-p or --min-p"),
        (["--top-k", "x"], "--top-k: expected integers >= 0"),
        (["--top-p", "a"], "--top-p: expected numbers separated by commas"),
        (["--top-p", "1.5"], "top_p: expected 0 < p <= 1"),
        (["--min-p", "-1"], "min_p: expected 0 to 1"),
    ],
)
def test_filters_that_make_no_sense(fsbench, options, message):
    code, _, err = fsbench("run", *TINY, "--provider", "matmul_only", *options)
    assert code == 2 and message in err


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
    code, _, err = fsbench("run", *TINY, "--history", "5")
    assert code == 2 and "--history: expected with a penalty" in err


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
    assert out.rstrip().endswith("Wrote here/results.csv and 3 tables beside it.")


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


def test_energy_needs_a_gpu(fsbench):
    code, _, err = fsbench("run", "--preset", "smoke", *TINY, "--energy", "1")
    assert code == 4 and "--energy: needs a GPU" in err
    code, _, err = fsbench("run", "--preset", "smoke", *TINY, "--energy", "0.1")
    assert code == 2 and "--energy: expected at least 0.5 seconds; got 0.1" in err


def test_by_default_results_are_filed_by_machine_and_time(fsbench, tmp_path):
    assert fsbench("run", "--preset", "smoke", *TINY)[0] == 0
    (folder,) = (tmp_path / "results" / "cpu").iterdir()
    assert len(folder.name.split("-")[0]) == len("20260101T000000")
    assert (folder / "results.csv").exists()


def test_several_shapes_and_models_make_a_sweep(fsbench):
    several = ["--d", "8,16", "--v", "50,60", "--model", "phi-4,gemma3-1b", "--batch", "1,2"]
    code, out, _ = fsbench("run", "--device", "cpu", "--preset", "smoke", *several, "--dry-run")
    assert code == 0
    assert "12 problems x 3 providers" in out
    assert "B=2 D=5120 V=100352 fp32" in out and "B=1 D=8 V=60 fp32" in out


def test_dry_run_prints_the_cells_and_what_is_left_out_and_writes_nothing(fsbench, tmp_path):
    code, out, _ = fsbench("run", "--device", "cpu", "--preset", "paper", "--dry-run")
    assert code == 0
    assert "18 problems x " in out and "25 warm-up and 100 timed steps in 5 rounds" in out
    assert "  not weight_stream: unavailable: runs on cuda only" in out.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_few_iterations_need_no_other_option(fsbench):
    code, out, _ = fsbench("run", "--device", "cpu", "--iters", "2", "--dry-run")
    assert code == 0 and "2 timed steps in 2 rounds" in out


def test_options_reach_the_measurement(fsbench, tmp_path):
    options = ["--temperature", "0.5", "--logits", "zipf:1.5", "--batch", "2"]
    assert fsbench("run", "--preset", "smoke", *TINY, *options, "--out", "x")[0] == 0
    for record in read_records(tmp_path / "x"):
        assert (record.cell.temperature, record.cell.logits, record.cell.b) == (0.5, "zipf:1.5", 2)


def test_a_plug_in_given_by_path_is_measured_beside_the_preset(fsbench, plugin, tmp_path):
    path_only = plugin()[:2]
    assert fsbench("run", "--preset", "smoke", *TINY, *path_only, "--out", "x")[0] == 0
    measured = {r.cell.provider: r.status for r in read_records(tmp_path / "x")}
    assert measured["mine"] == "ok" and len(measured) == 4


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
    # Alone, it leaves nothing measured.
    assert fsbench("run", *TINY, *broken, "--out", "y")[0] == 3


def test_the_summary_fits_80_columns_and_does_not_mix_conditions(fsbench, tmp_path):
    batches = ["--batch", "1,2,4,8,16,32,64,128,256"]
    arguments = ["run", "--preset", "smoke", *TINY, *batches]
    _, out, _ = fsbench(*arguments, "--out", "x")
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    _, out, _ = fsbench("run", "--resume", "x", "--temperature", "0.5")
    assert out.count("Median time, us") == 2 and "T = 0.5" in out and "T = 1," in out


# Exit codes


def test_a_failed_check_exits_1_and_is_not_timed(fsbench, plugin, tmp_path):
    wrong = plugin(wrong=" * 0")
    others = ["--provider", "matmul_only", "--check"]
    code, out, _ = fsbench("run", *TINY, *wrong, *others, "--out", "x")
    assert code == 1
    assert "mine: check_failed (all 2 cells): greedy: " in out
    table = pd.read_csv(tmp_path / "x" / "results.csv").set_index("provider")
    assert table.loc["mine", "median_us"].isna().all()
    # The user may insist.
    assert fsbench("run", *TINY, *wrong, "--out", "y")[0] == 0


def test_failed_cells_exit_3(fsbench, plugin):
    failing = plugin(wrong=" + 1 // 0")
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
    "--provider multinomal": "provider: expected one of ...; did you mean 'multinomial'?",
    "--model qwen3_8b": "model: expected one of ...; did you mean 'qwen3-8b'?",
    "--preset papper": "preset: expected one of ...; did you mean 'paper'?",
    "--timer cpt": "timer: expected one of ...",
    "--dtype bf61": "dtype: expected one of bf16, fp16, fp32; got 'bf61'; did you mean 'bf16'?",
    "--device gpu": "--device: expected auto, cuda or cpu; got 'gpu'",
    "--batch 0": "--batch: expected integers >= 1 separated by commas, ...; got '0'",
    "--batch 1,-2": "--batch: expected integers >= 1 ...; got '1,-2'",
    "--batch 1;2": "--batch: expected integers >= 1 ...; got '1;2'",
    "--batch=": "--batch: expected integers >= 1 ...; got ''",
    "--d 0 --v 5": "--d: expected integers >= 1 ...; got '0'",
    "--d 5 --v -1": "--v: expected integers >= 1 ...; got '-1'",
    "--d 64": "--v: expected together with --d; got only --d",
    "--v 64": "--d: expected together with --v; got only --v",
    "--temperature -1": "temperature: expected a finite number >= 0 ...; got -1.0",
    "--temperature nan": "temperature: expected a finite number >= 0 ...; got nan",
    "--temperature inf": "temperature: expected a finite number >= 0 ...; got inf",
    "--logits flat": "logits: expected normal:SIGMA, ...; got 'flat'",
    "--iters 0": "--iters: expected an integer >= 1; got 0",
    "--iters 2 --rounds 5": "--iters: expected at least one step ... --rounds 5; got 2",
    "--rounds 0": "--rounds: expected an integer >= 1; got 0",
    "--warmup -1": "--warmup: expected an integer >= 0; got -1",
    "--seed 9223372036854775808": "--seed: expected an integer of 64 bits; got ...",
    "--gpu -1": "--gpu: expected integers >= 0 ...; got '-1'",
    "--l2 lukewarm": "l2: expected one of cold, cold-write, warm; got 'lukewarm'",
    "--provider-path missing.py": "--provider-path: expected an existing .py file; got missing.py",
    "--out a --resume b": "b is not a results folder: it has no env.json",
    "--resume missing": "missing is not a results folder: it has no env.json",
    "--resume x --gpu 0,1": "x is not a results folder: it has no env.json",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(fsbench, tmp_path, arguments):
    given = arguments.split(" ")
    device = [] if "--device" in given else ["--device", "cpu"]
    code, out, err = fsbench("run", *device, *given)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    start, *rest = MISTAKES[arguments].split("...")
    assert line.startswith(f"error: {start}")
    assert all(part in line for part in rest)
    assert list(tmp_path.iterdir()) == []  # nothing half-written


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--device cpu --timer cupti", "timer cupti: needs a CUDA device, got device cpu; use cpu"),
        ("--device cpu --timer events", "timer events: needs a CUDA device, got device cpu"),
        ("--device cuda", "--device cuda: torch sees no CUDA device; `fsbench doctor` says why"),
    ],
)
def test_a_missing_device_or_timer_exits_4(fsbench, tmp_path, monkeypatch, arguments, line):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = fsbench("run", "--preset", "smoke", *arguments.split())
    assert (code, out) == (4, "")
    assert err.startswith(f"error: {line}") and len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_gpu_that_is_not_there_exits_4_before_any_is_measured(fsbench, tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    code, _, err = fsbench("run", "--gpu", "0,7")
    assert (code, err) == (4, "error: --gpu: expected indices below 2; got 7\n")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_option_exits_2(fsbench):
    code, _, err = fsbench("run", "--bogus")
    assert code == 2 and "--bogus" in err and "Traceback" not in err


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


def test_an_out_that_cannot_be_written_is_one_line(fsbench, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = fsbench("run", "--preset", "smoke", *TINY, "--out", "file")
    assert (code, err) == (2, "error: cannot write results in file: File exists\n")


# Resuming


def test_resume_repeats_the_options_of_the_run_and_none_of_its_rounds(fsbench, tmp_path):
    fsbench("run", "--preset", "smoke", *TINY, "--temperature", "0.5", "--out", "x")
    before = (tmp_path / "x" / "points.jsonl").read_bytes()
    assert fsbench("run", "--resume", "x")[0] == 0
    assert (tmp_path / "x" / "points.jsonl").read_bytes() == before
    # What is given on top extends the run.
    fsbench("run", "--resume", "x", "--batch", "5")
    cells = [record.cell for record in read_records(tmp_path / "x")]
    assert {(cell.b, cell.temperature) for cell in cells} == {(1, 0.5), (3, 0.5), (5, 0.5)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 99}, "env.json: expected schema 1; got 99"),
        ({"cpu": "another CPU"}, "was measured on another machine: expected cpu "),
        ({"gpu": "NVIDIA H200"}, "was measured on another machine: expected gpu ''"),
    ],
)
def test_resuming_another_schema_or_machine_is_refused(fsbench, tmp_path, change, message):
    fsbench("run", "--preset", "smoke", *TINY, "--out", "x")
    path = tmp_path / "x" / "env.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    code, _, err = fsbench("run", "--resume", "x")
    assert code == 2 and len(err.splitlines()) == 1 and message in err


def _script(*arguments, setup=""):
    code = f"{setup}\nfrom fsbench.cli import main\nmain()"
    return [sys.executable, "-c", code, *map(str, arguments)]


def _rounds(folder):
    """How often each (sampler, B, round) stands in points.jsonl."""
    return Counter(
        (record["cell"]["provider"], record["cell"]["b"], record["round"])
        for record in map(json.loads, (folder / "points.jsonl").read_text().splitlines())
    )


def test_a_killed_run_is_readable_and_resume_completes_it_without_repeating(
    fsbench, plugin, tmp_path
):
    options = [*TINY, *plugin("slow", pause=0.02), "--provider", "matmul_only", "--out", "x"]
    options += ["--batch", "1,2,3", "--iters", "12", "--rounds", "6"]
    folder = tmp_path / "x"
    process = subprocess.Popen(_script("run", *options), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    try:
        while not (folder / "points.jsonl").exists() or (
            (folder / "points.jsonl").read_bytes().count(b"\n") < 15
        ):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    records = read_records(folder)
    measured = sum(len(record.rounds) for record in records)
    assert 15 <= measured < 36
    assert not (folder / "results.csv").exists()
    # As if the kill had come in the middle of a line.
    with (folder / "points.jsonl").open("a") as points:
        points.write('{"schema": 1, "cell": {"provi')
    assert read_records(folder) == records
    assert fsbench("run", "--resume", folder)[0] == 0
    every = [(name, b, n) for name in ("slow", "matmul_only") for b in (1, 2, 3) for n in range(6)]
    assert _rounds(folder) == Counter(every)
    table = pd.read_csv(folder / "results.csv")
    assert set(table["status"]) == {"ok"} and set(table["n_samples"]) == {12}


def test_a_full_disk_is_one_line_and_the_run_can_be_continued(fsbench, tmp_path):
    """A limit on the size of files stands for the disk: a write that crosses it is cut short."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))"
    arguments = ["run", "--preset", "smoke", *TINY, "--rounds", "4", "--out", "x"]
    done = subprocess.run(
        _script(*arguments, setup=limit), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    stopped, error = done.stderr.splitlines()[-2:]
    assert stopped == "stopped; to continue: fsbench run --resume x"
    assert error == "error: cannot write results in x: File too large"
    assert "Traceback" not in done.stderr
    text = (tmp_path / "x" / "points.jsonl").read_bytes()
    assert len(text) == 6000 and not text.endswith(b"\n")
    before = read_records(tmp_path / "x")
    assert before
    assert fsbench("run", "--resume", "x")[0] == 0
    assert set(_rounds(tmp_path / "x").values()) == {1}
    assert len(_rounds(tmp_path / "x")) == 3 * 2 * 4


def test_an_interrupt_keeps_what_was_measured_and_says_how_to_go_on(plugin, tmp_path):
    arguments = ["run", *TINY, *plugin("slow", pause=0.05), "--iters", "50", "--rounds", "50"]
    process = subprocess.Popen(
        _script(*arguments, "--out", "x"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore it, and so would the child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    points = tmp_path / "x" / "points.jsonl"
    deadline = time.monotonic() + 60
    while not points.exists() or points.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "stopped; to continue: fsbench run --resume x" in err and "Traceback" not in err
    assert read_records(tmp_path / "x")


def test_every_option_has_help():
    import typer

    for name, command in typer.main.get_command(cli.app).commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.help, f"{name} {parameter.name}"


def test_exit_codes_are_documented_where_users_look(fsbench):
    code, out, _ = fsbench("--help")
    assert code == 0
    meanings = ("ok", "a check failed", "usage", "some cells failed", "no usable device or timer")
    codes = ", ".join(f"{number} {meaning}" for number, meaning in enumerate(meanings))
    assert f"Exit codes: {codes}." in " ".join(out.split())


def test_version(fsbench):
    import fsbench as package

    assert fsbench("--version") == (0, f"{package.__version__}\n", "")


def test_python_m_fsbench(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fsbench", "run", "--dry-run", "--device", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "problems x" in done.stdout


def test_energy_is_printed_by_sampler_and_batch(capsys):
    from fsbench.cli.reporting import print_energy

    row = dict(kind="exact", fused=True, gpu="NVIDIA H200", device="cuda", d=4, v=9, dtype="bf16")
    how = dict(tp=1, temperature=1.0, logits="normal:1", timer="cupti", graph=True, l2="cold")
    time = dict(status="ok", median_us=1.0, ci_lo_us=1.0, ci_hi_us=1.0, idle_w=88.4)
    table = [
        {**row, **how, **time, "provider": name, "label": name, "b": b, "j_per_token": joules}
        for name, b, joules in (("a", 1, 0.21), ("a", 2, 0.1), ("b", 1, 0.3), ("c", 1, None))
    ]
    print_energy(pd.DataFrame(table))
    lines = capsys.readouterr().out.splitlines()
    assert "of the whole GPU, which draws 88 W when idle" in lines
    assert [line.split() for line in lines[-2:]] == [["a", "210.0", "100.0"], ["b", "300.0", "-"]]
