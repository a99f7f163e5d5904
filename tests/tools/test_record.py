"""tools/record.py with doubles: an fsbench that waits or fails on request, and made-up GPUs."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from functools import partial

import pytest
import record
import record_jobs
import typer
from record_jobs import Job, fill, read_jobs
from tiny_run import TINY
from tree import ROOT

from fsbench.cli import app
from fsbench.discover import Found, discover, load
from fsbench.machine.hardware import Gpu
from fsbench.measure.presets import PRESETS
from fsbench.problem import Problem

FSBENCH = """#!/bin/bash
# fsbench COMMAND HOW OUT, or fsbench run --resume OUT
echo "$*" >> "$CALLS"
trap "exit 130" INT
[ "$2" = deaf ] && trap "" INT
mkdir -p "$3" && touch "$3/env.json" && echo "{}" >> "$3/points.jsonl"
case $2 in
    fails) exit 3 ;;
    waits | deaf) while true; do sleep 0.05; done ;;
esac
"""


class Clock:
    """Stands still until a job has begun; then jumps, and goes on at every look if it `runs`."""

    def __init__(self, folder, runs):
        self.folder, self.runs, self.now = folder, runs, 0.0

    def __call__(self):
        if list(self.folder.glob("*/env.json")):
            self.now = max(self.now + self.runs, 3600.0)
        return self.now


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Calls the program for a table of jobs: (record.json, what fsbench was called with)."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "fsbench"
    script.write_text(FSBENCH)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent), prepend=":")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FSBENCH_COMMIT", "1111111")
    monkeypatch.setattr(record.hardware, "gpus", lambda: [Gpu(0, "NVIDIA H200", "", None, "")])
    monkeypatch.chdir(tmp_path)  # back from where the program goes

    def call(jobs, *options):
        table = tmp_path / "jobs.toml"
        table.write_text(
            "".join(
                f"[{name}]\ncommand = 'fsbench {mode} {{out}}'\nseconds = {60 * minutes}\n"
                for name, (mode, minutes) in jobs.items()
            )
        )
        record.main(["--jobs", str(table), "--folder", str(tmp_path / "out"), *options])
        calls = (tmp_path / "calls").read_text().replace(f"{tmp_path}/out/", "")
        calls = re.sub(r"-\d{8}(T\d{6})?\b", "", calls).splitlines()
        (tmp_path / "calls").write_text("")
        return json.loads((tmp_path / "out" / "record.json").read_text()), calls

    (tmp_path / "calls").write_text("")
    return call


JOBS = {"a": ("run ends", 1), "b": ("verify fails", 1), "c": ("run ends", 1)}


def test_a_failure_stops_nothing_and_no_job_is_done_twice(call, capsys):
    state, calls = call(JOBS, "--only", "a,b")
    assert calls == ["run ends a", "verify fails b"]
    assert {name: (each["exit"], each["commit"]) for name, each in state.items()} == {
        "a": (0, "1111111"),
        "b": (3, "1111111"),
    }
    assert call(JOBS)[1] == ["run ends c"]
    state, calls = call(JOBS)
    assert not calls and state["c"]["exit"] == 0
    capsys.readouterr()
    call({**JOBS, "d": ("run ends", 7)}, "--list")
    a, b, _, d, last_line = capsys.readouterr().out.splitlines()
    assert "exit 0" in a and "1111111" in a and "exit 3" in b
    assert d.split() == ["d", "420", "s", "d-DATE", "to", "do"] and last_line.startswith(
        "420 s to do"
    )


@pytest.mark.parametrize(
    "command, kept",
    [
        ("fsbench run --preset lean --out x", "fsbench run"),
        ("A_B=0 C=x fsbench e2e --engine vllm", "A_B=0 C=x fsbench e2e"),
        ("fsbench verify --tier ci", ""),
        ("cold=$(mktemp -d); fsbench run --preset quick", ""),
        ("fsbench run", ""),
    ],
)
def test_what_continues_a_job_keeps_its_variables(command, kept):
    assert Job("job", command, 1).resume_command == kept


@pytest.mark.parametrize(
    "mode, resumed", [("run", "run --resume long"), ("verify", "verify ends long")]
)
@pytest.mark.parametrize("heeds", [True, False])
def test_a_job_is_stopped_at_the_deadline_and_goes_on_later(
    call, tmp_path, monkeypatch, mode, resumed, heeds
):
    """With more time a run is continued, and other jobs start again from the beginning."""
    with monkeypatch.context() as clock:
        clock.setattr(record.time, "monotonic", Clock(tmp_path / "out", not heeds))
        outcome = "waits" if heeds else "deaf"
        state, _ = call(
            {"long": (f"{mode} {outcome}", 1), "b": ("verify ends", 1)}, "--minutes", "5"
        )
    assert "exit" not in state["long"] and state["long"]["seconds"] >= 3600 and "b" not in state
    jobs = {"long": (f"{mode} ends", 1), "b": ("verify ends", 1)}
    out = tmp_path / "out" / state["long"]["out"]
    assert {each.name for each in out.iterdir()} == {"env.json", "points.jsonl"}
    part = out / "part"
    part.touch()
    state, calls = call(jobs, "--minutes", "5")
    assert calls == (["run --resume long"] if mode == "run" else []) + ["verify ends b"]
    state, calls = call(jobs)
    assert calls == ([] if mode == "run" else [resumed]) and state["long"]["exit"] == 0
    assert part.exists() == (mode == "run")
    samples = gzip.decompress((out / "points.jsonl.gz").read_bytes())  # packed when the job ended
    assert samples == b"{}\n" * (2 if mode == "run" else 1) and not (out / "points.jsonl").exists()


@pytest.mark.parametrize("samples", ["points.jsonl", "steps.jsonl"])
def test_samples_of_a_finished_job_are_packed_and_its_tables_of_speedups_removed(tmp_path, samples):
    (tmp_path / samples).write_text("{}\n")
    (tmp_path / "speedup_h200_d4096_v151936.md").write_text("")
    (tmp_path / "env.json").write_text("{}")
    record.pack(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"env.json", f"{samples}.gz"}
    assert gzip.decompress((tmp_path / f"{samples}.gz").read_bytes()) == b"{}\n"


def test_a_job_begins_only_if_its_time_fits(call):
    state, calls = call({"a": ("verify ends", 6), "b": ("verify ends", 4)}, "--minutes", "5")
    assert calls == ["verify ends b"] and "a" not in state
    assert call({"a": ("run ends", 60)}, "--minutes", "5")[1] == ["run ends a"]
    assert call({"c": ("run ends", 0.5)}, "--minutes", "1")[1] == ["run ends c"]
    with pytest.raises(SystemExit, match="no job is 'x'"):
        call(JOBS, "--only", "a,x")


def test_compiled_runs_start_no_compile_processes(call):
    jobs = {"a": ("run ends", 1), "b": ("verify ends", 1)}
    assert call(jobs, "--compiled")[1] == ["run ends a --warmers 0", "verify ends b"]


def test_gpus_are_shared_by_untimed_jobs_alone(tmp_path):
    timed, untimed = Job("t", "", 1), Job("u", "", 1, untimed=True)
    alone = Job("a", "", 1, alone=True)
    recorder = record.Recorder(tmp_path, ["0", "1"], "")

    def free(*running):
        recorder.running = [record.Started(job, gpus, None, 0) for job, *gpus in running]
        return [recorder.free(job) for job in (timed, untimed, alone)]

    assert free() == [["0"], ["0"], ["0", "1"]]
    assert free((timed, "0")) == [["1"], ["1"], []]
    assert free((timed, "0"), (untimed, "1")) == [[], ["1"], []]
    assert free((timed, "0"), (timed, "1")) == [[], [], []]
    assert free((timed, "0"), *[(untimed, "1")] * record.UNTIMED_PER_GPU) == [[], [], []]
    assert free((alone, "0", "1")) == [[], [], []]


def test_each_gpu_has_its_share_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(record.os, "sched_getaffinity", lambda pid: set(range(8)))
    recorder = record.Recorder(tmp_path, ["0", "1", "3"], "")
    shares = [recorder.cores([gpu]) for gpu in recorder.gpus]
    assert shares == [{0, 1, 2}, {3, 4, 5}, {6, 7}]
    assert recorder.cores(recorder.gpus) == set(range(8))
    monkeypatch.setattr(record.os, "sched_getaffinity", lambda pid: {0, 1})
    assert recorder.cores(["3"]) == {0, 1}  # it has no share of two


def test_a_job_runs_on_the_cores_of_its_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    all_cores = os.sched_getaffinity(0)
    recorder = record.Recorder(tmp_path, ["0"], "1111111")
    monkeypatch.setattr(recorder, "cores", lambda gpus: {min(all_cores)})
    report = "grep Cpus_allowed_list /proc/self/status > {out}"
    recorder.run([Job("where", report, 1, out="cores.txt")], 1)
    assert (tmp_path / "cores.txt").read_text().split() == [
        "Cpus_allowed_list:",
        str(min(all_cores)),
    ]
    assert os.sched_getaffinity(0) == all_cores
    monkeypatch.delattr(os, "sched_setaffinity")  # as outside Linux
    recorder.run([Job("again", report, 1, out="all.txt")], 1)
    assert (tmp_path / "all.txt").exists()


def test_one_call_at_a_time_even_if_only_its_jobs_are_left(tmp_path):
    recorder = record.Recorder(tmp_path, ["0"], "")
    recorder.start(Job("a", "sleep 600", 1), ["0"])
    recorder.lock.close()  # as when the program is killed
    with pytest.raises(SystemExit, match="another call"):
        record.Recorder(tmp_path, ["0"], "")
    recorder.stop()
    record.Recorder(tmp_path, ["0"], "")


def commit_file(tree, file):
    """Add a file to a git repository, which is made at first, and commit it."""
    (tree / file).parent.mkdir(parents=True, exist_ok=True)
    (tree / file).write_text("new")
    git = ["git", "-C", tree, "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "."]):
        subprocess.run([*git, *command], check=True)


def test_other_code_is_refused_or_measured_anew(call, tmp_path, monkeypatch):
    tree = tmp_path / "tree"
    commit = partial(commit_file, tree)
    commit("kernels/a.py")
    monkeypatch.setattr(record, "ROOT", tree)
    monkeypatch.delenv("FSBENCH_COMMIT")
    first = call({"a": ("run ends", 1)})[0]["a"]
    commit("docs.md")
    commit("fsbench/records/peaks.toml")
    commit("fsbench/e2e/models.py")
    assert call({"a": ("run ends", 1)})[1] == []
    commit("kernels/b.py")
    with pytest.raises(SystemExit, match="a: measured with other code"):
        call({"a": ("run ends", 1)})
    assert call({"a": ("run ends", 1), "b": ("run ends", 1)}, "--only", "b")[1] == ["run ends b"]
    state, calls = call({"a": ("run ends", 1)}, "--again")
    assert calls == ["run ends a"] and state["a"]["commit"] != first["commit"]
    assert (tmp_path / "out" / first["out"]).is_dir() and state["a"]["out"] != first["out"]
    assert call({"a": ("run ends", 1)}, "--again")[1] == []


def test_code_of_engines_is_that_of_their_jobs_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "ROOT", tmp_path)
    monkeypatch.delenv("FSBENCH_COMMIT", raising=False)

    def commit(file):
        commit_file(tmp_path, file)
        return record.commit_here()

    first, second = commit("fsbench/e2e/a.py"), commit("fsbench/e2e/b.py")
    run, engine = Job("run", "fsbench run", 1), Job("engine", "fsbench e2e", 1, needs="vllm")
    assert record.same_code(first, second, run)
    assert not record.same_code(first, second, engine)
    third = commit("kernels/a.py")
    assert not any(record.same_code(second, third, job) for job in (run, engine))


CHECKED = Problem(300, 64, 500, "bf16")
"""The largest batch of the check before timing."""


def test_the_jobs_that_are_shipped_are_commands_that_exist(monkeypatch):
    monkeypatch.setattr(record_jobs, "samplers", lambda: ["flash_sampling"])
    commands = typer.main.get_command(app).commands
    monkeypatch.chdir(ROOT)
    names = set(discover())
    jobs = read_jobs(ROOT / "tools" / "record.toml", "h100")
    assert len({job.name for job in jobs}) == len({job.out for job in jobs}) == len(jobs)
    for job in jobs:
        assert 0 < job.seconds <= 600
        whole = fill(job.command, out="x", degrees="1,2")
        assert not {"{", "}"} & set(whole), job
        if "fsbench" not in whole:
            program = whole.partition("python ")[2].removeprefix("-m pytest -q -m gpu ").split()[0]
            assert (ROOT / program).exists(), job
            continue
        name, *arguments = whole.partition("fsbench ")[2].split()
        options = commands[name].make_context(name, arguments).params
        files = options.get("provider_path") or []
        cases = [entry for path in files for entry in load(path.stem, "", path)]
        added = {entry.name for entry in cases}
        assert set(options.get("provider") or []) <= names | added, job
        assert not files or len(added & set(options["provider"])) == len(added), job
        assert (options.get("preset") or "paper") in PRESETS, job
        if options.get("check"):
            refused = {case.name: case.provider.unsupported_reason(CHECKED) for case in cases}
            assert not any(refused.values()), (job, refused)


def test_samplers_that_need_the_host_at_each_step_are_not_verified_on_a_gpu(monkeypatch):
    monkeypatch.setattr(Found, "unavailable_reason", lambda entry, device: None)
    names = record_jobs.samplers()
    assert {"flash_sampling", "greedy", "flashsampling_authors"} <= set(names)
    assert not {"simple_offload", "llama_cpp_chain", "scaled_matmul", "flash_score"} & set(names)


def test_jobs_are_listed_for_a_gpu_that_is_not_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record.hardware, "gpus", list)
    monkeypatch.setattr(record.shutil, "which", lambda name: "here" if name == "fsbench" else None)
    monkeypatch.setenv("FSBENCH_COMMIT", "1111111")
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "jobs.toml"
    table.write_text(
        "[slower]\nh100 = 1.5\n[a]\ncommand = 'true'\nseconds = 100\n"
        "[b]\ncommand = 'true'\nseconds = 10\nneeds = 'no-such-program'\n"
        "[c]\ncommand = 'true'\nseconds = 10\nout = '{name}/{key}'\neach.x = '--y'\ngpus = 2\n"
    )
    record.main(["--list", "--gpu", "h100", "--jobs", str(table)])
    a, b, c, last_line = capsys.readouterr().out.splitlines()
    assert a.split() == ["a", "150", "s", "a-DATE", "to", "do"]
    assert b.endswith("needs no-such-program")
    assert "c-x/x" in c and c.endswith("to do on 2 GPUs") and last_line.startswith("165 s")
    with pytest.raises(SystemExit, match="expected an NVIDIA GPU"):
        record.main([])
    assert [path.name for path in tmp_path.iterdir()] == ["jobs.toml"]


@pytest.mark.full
def test_a_cpu_measures_jobs_of_its_own(tmp_path, monkeypatch, capsys):
    """With the real command line; a dry run first, which leaves nothing."""
    monkeypatch.setattr(record.hardware, "gpus", list)
    monkeypatch.setenv("FSBENCH_COMMIT", "1111111")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "fsbench"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m fsbench "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    options = " ".join([*TINY, "--provider greedy"])
    table = tmp_path / "jobs.toml"
    table.write_text(
        f"[run]\ncommand = 'fsbench run {options} --out {{out}}'\nseconds = 60\n"
        "[verify]\ncommand = 'fsbench verify --tier gate --device cpu --provider {each} "
        "--output {out}'\nout = 'verify/{each}.jsonl'\neach = ['greedy']\nseconds = 60\n"
    )
    call = ["--jobs", str(table), "--folder", str(tmp_path / "out")]
    record.main([*call, "--dry-run"])
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith(f"run: fsbench run {options} --out ") and len(output) == 2
    assert not (tmp_path / "out").exists()
    record.main(call)
    state = record.read_state(tmp_path / "out")
    assert {name: entry["exit"] for name, entry in state.items()} == {"run": 0, "verify-greedy": 0}
    assert (tmp_path / "out" / state["run"]["out"] / "results.csv").exists()
    assert (tmp_path / "out" / "verify" / "greedy.jsonl").exists()
    capsys.readouterr()
    record.main([*call, "--dry-run"])
    assert not capsys.readouterr().out


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_the_committed_records_have_the_results_that_they_name(gpu):
    folder = ROOT / "results" / gpu
    state = record.read_state(folder)
    assert len(state) > 20
    assert [name for name, entry in state.items() if not (folder / entry["out"]).exists()] == []
