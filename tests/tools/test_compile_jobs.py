"""tools/compile_jobs.py: what it takes from the shipped jobs, and its processes, on a CPU."""

from __future__ import annotations

import shlex
from collections import Counter

import compile_jobs
import pytest
from record_jobs import Job, read_jobs
from tiny_run import TINY
from tree import ROOT

from fsbench.machine.hardware import Gpu
from fsbench.measure.gate import setting_of
from fsbench.provider import Kind


def job(options, **fields):
    return Job("job", f"fsbench run {options} --out {{out}}", 60, **fields)


def one_sampler(provider, batch, *options):
    head = f"--d 4096 --v 151936 --batch {batch} --provider {provider}"
    return compile_jobs.measured(job(" ".join([head, *options])))


def called(tasks):
    """Return (sampler, B, whether it is verified) of each cell, in order."""
    return [(c.provider, c.problem.B, part.plan.check) for part, cells in tasks for c in cells]


def test_a_cell_of_several_jobs_is_called_once_and_verified_first():
    jobs = [
        one_sampler("greedy", "1,2,4", "--no-check"),
        one_sampler("greedy", "4,2,8", "--logits normal:3"),
        one_sampler("greedy", "2,16"),
    ]
    tasks = compile_jobs.tasks(jobs)
    assert called(tasks) == [
        ("greedy", 4, True),
        *[("greedy", B, False) for B in (1, 2, 4, 8, 16)],
    ]


def test_other_filters_and_heads_are_other_cells_and_a_task_has_few():
    batches = ",".join(map(str, range(1, compile_jobs.CELLS + 2)))
    tasks = compile_jobs.tasks([one_sampler("greedy", batches, "--no-check", "--top-p 0.9,0.5")])
    assert [len(cells) for _, cells in tasks] == [compile_jobs.CELLS] * 2 + [2]
    assert len(set(called(tasks))) == compile_jobs.CELLS + 1


def test_samplers_that_autotune_and_other_jobs_are_left_to_the_record():
    assert not compile_jobs.tasks([one_sampler("exponential_race_tuned", "1")])
    others = [
        Job("cold", "cold=$(mktemp -d); fsbench run --out {out}", 60),
        Job("verify", "fsbench verify --output {out}", 60),
        job("--preset tp --tp 1,2", gpus=2),
    ]
    assert [compile_jobs.measured(each) for each in others] == [None] * 3


def test_a_problem_that_a_sampler_does_not_take_is_left_out():
    draft = ["--provider-path", str(ROOT / "tools" / "cases" / "drafts.py")]
    assert called(compile_jobs.tasks([one_sampler("verify_token", "1,4", *draft)])) == [
        ("verify_token", 4, False)
    ]


def test_each_sampler_of_the_shipped_jobs_is_called_and_verified_as_they_do(monkeypatch):
    monkeypatch.chdir(ROOT)
    shipped = map(compile_jobs.measured, read_jobs(ROOT / "tools" / "record.toml", "h200"))
    jobs = [each for each in shipped if each is not None]
    assert len(jobs) > 50
    tasks = compile_jobs.tasks(jobs)
    parts = [
        (c.provider, c.problem.D, c.problem.V, c.problem.B) for _, cells in tasks for c in cells
    ]
    verified = {
        (c.provider, setting_of(c.problem))
        for part, cells in tasks
        for c in cells
        if part.plan.check
    }
    for each in jobs:
        entries = {one.name: one for one in each.plan.providers if not one.provider.tunes}
        for cell in each.plan.cells("", each.timer, each.l2):
            problem, entry = cell.problem, entries.get(cell.provider)
            if entry and not entry.refusal(problem, can_run=False):
                assert (cell.provider, problem.D, problem.V, problem.B) in parts
                if each.plan.check and cell.kind != str(Kind.LOWER_BOUND):
                    assert (cell.provider, setting_of(problem)) in verified


@pytest.mark.full
def test_processes_verify_and_call_samplers_and_failures_are_named(tmp_path):
    path = tmp_path / "fails.py"
    path.write_text(
        "from fsbench.provider import Capabilities, Kind, Provider\n"
        "def build(problem, weight):\n    raise ValueError('not today')\n"
        "on_cpu = Capabilities(devices=('cpu',), dtypes=('fp32',))\n"
        "PROVIDER = Provider('fails', 'fails', Kind.EXACT, build, capabilities=on_cpu)\n"
    )
    options = shlex.join([*TINY, "--provider-path", str(path)])
    measured = compile_jobs.measured(
        job(f"{options} --no-check --provider greedy --provider fails"), device="cpu"
    )
    checked = compile_jobs.measured(job(f"{options} --check --provider greedy"), device="cpu")
    tasks = compile_jobs.tasks([measured, checked])
    failed, seconds = compile_jobs.compile_tasks(tasks, [0], processes=2)
    assert failed and all(text.startswith("first of fails: ") for text in failed)
    assert all(text.endswith(": ValueError: not today") for text in failed)
    assert set(seconds) == {"greedy", "fails"} and seconds["greedy"] > 0


def test_tasks_are_given_to_the_gpus_that_cuda_shows(monkeypatch, tmp_path):
    gpus = [Gpu(index, "NVIDIA H200", "", None, "") for index in range(4)]
    monkeypatch.setattr(compile_jobs.hardware, "gpus", lambda: gpus)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)  # CUDA_VISIBLE_DEVICES=0,1,2
    used_gpus = []
    monkeypatch.setattr(
        compile_jobs,
        "compile_tasks",
        lambda tasks, devices, processes: (
            used_gpus.extend(devices) or compile_jobs.Tried([], Counter())
        ),
    )
    monkeypatch.chdir(tmp_path)  # back from where the program goes
    compile_jobs.main(["--only", "score"])
    assert used_gpus == [0, 1, 2]
