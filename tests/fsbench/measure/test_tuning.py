"""`fsbench tune`: what is timed, what is chosen, what is written; with a plug-in and no GPU."""

from __future__ import annotations

import csv
import json
import sys

import pytest
import torch

from fsbench import cli
from fsbench.cli import tune
from fsbench.errors import describe
from fsbench.measure import tuning
from fsbench.measure.tuning import Timing, select
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider, Tuning
from fsbench.timers.host import FakeTimer

US = {"plain": 90.0, "slow": 200.0, "fast": 80.0}
"""What the configs of the fake kernel take; two more fail."""


def timings(times, in_use="a"):
    """Timings of one bucket from {D: {config: us}}."""
    return [
        Timing(Problem(64, D, 1000), config, config == in_use, us)
        for D, row in times.items()
        for config, us in row.items()
    ]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        # The fastest wins.
        ({4096: {"a": 100, "b": 90, "c": 95}}, [(None, "b")]),
        # What is in use stays if it is about as fast.
        ({4096: {"a": 90.4, "b": 90}}, [(None, "a")]),
        ({4096: {"a": 90.6, "b": 90}}, [(None, "b")]),
        # One for all D that is about the fastest on each, though the fastest on none.
        ({64: {"b": 99, "c": 90, "d": 90.3}, 128: {"b": 20, "c": 21, "d": 20.05}}, [(None, "d")]),
        ({64: {"a": 99, "b": 50, "c": 50.2}, 128: {"a": 99, "b": 70, "c": 60}}, [(None, "c")]),
        # Else one for each range of D; neighbors that agree share a row.
        ({8192: {"a": 20, "b": 10}, 4096: {"a": 10, "b": 20}}, [(6144, "a"), (None, "b")]),
        (
            {1: {"a": 9, "b": 5}, 3: {"a": 9, "b": 5}, 7: {"a": 5, "b": 9}},
            [(5, "b"), (None, "a")],
        ),
        # A config that failed on a D is not chosen for it; a D without any time is ignored.
        ({64: {"a": None, "b": 10}, 128: {"a": None, "b": None}}, [(None, "b")]),
        ({64: {"a": None}}, []),
    ],
)  # fmt: skip
def test_the_choice(times, expected):
    assert select(timings(times)) == expected


def test_heads_of_one_d_count_together():
    rows = [
        Timing(Problem(64, 4096, V), config, False, us)
        for V, config, us in [
            *((1000, "a", 10.0), (2000, "a", 40.0), (1000, "b", 15.0), (2000, "b", 20.0)),
            (1000, "failed at V = 2000", 1.0),
        ]
    ]
    assert select(rows) == [(None, "b")]


class _Kernel:
    """A kernel with the configs of US, a wrong one and one that cannot be built."""

    def __init__(self):
        self.now = ""

    def build(self, problem, weight, config):
        if config == "too large":
            raise RuntimeError("out of resource")

        def launch(hidden, seed, offset):
            self.now = config
            return (hidden.float() @ weight.float().T).argmax(1) + (config == "wrong")

        return launch


def provider(kernel, build=None):
    names = [*US, "wrong", "too large"]
    return Provider(
        "fake",
        "Fake",
        Kind.GREEDY,
        build=lambda problem, weight: kernel.build(problem, weight, "plain"),
        capabilities=Capabilities(devices=("cpu",)),
        tuning=Tuning("fake", (8, 16), lambda problem: names, kernel.build, lambda *a: str(a)),
    )


def test_configs_are_checked_and_timed_in_interleaved_rounds():
    kernel, order = _Kernel(), []
    timer = FakeTimer(lambda: order.append(kernel.now) or US[kernel.now], jitter=0.0)
    problem = Problem(4, 32, 100, device="cpu")
    weight = torch.randn(100, 32, dtype=torch.bfloat16)
    configs = {**dict.fromkeys([*US, "wrong", "too large"], ""), "broken": "said the compiler"}
    result = tuning.time_configs(provider(kernel), problem, weight, configs, timer)
    assert {t.config: t.median_us for t in result if t.median_us} == US
    assert [t.config for t in result if t.in_use] == ["plain"]
    assert {t.config: t.note for t in result if t.note} == {
        "wrong": "wrong tokens",
        "too large": describe(RuntimeError("out of resource")),
        "broken": "said the compiler",
    }
    assert order == [name for name in US for _ in range(tuning.ITERATIONS)] * tuning.ROUNDS


def test_problems_share_compilation_and_weight(monkeypatch):
    compiled = []

    def compile_all(name, paths, jobs):
        compiled.extend((B, config, problem.D) for (B, config), problem in jobs.items())
        for B, config in jobs:
            yield B, config, "no" if config == "fast" else ""

    monkeypatch.setattr(tuning, "_compile_all", compile_all)
    made = []
    make = tuning.inputs.make_weight
    monkeypatch.setattr(tuning.inputs, "make_weight", lambda *a: made.append(a[0].D) or make(*a))
    kernel, reports = _Kernel(), []
    problems = [Problem(B, D, 100, device="cpu") for D in (32, 64) for B in (8, 16)]
    result = list(
        tuning.measure(
            provider(kernel), [], problems, 3, FakeTimer(), lambda *report: reports.append(report)
        )
    )
    assert [[t.config for t in of_one] for of_one in result] == [list(US)] * 4
    assert compiled == [(B, config, 64) for B in (8, 16) for config in US]
    assert made == [32, 64]
    assert all(t.note == "no" for of_one in result for t in of_one if t.config == "fast")
    done = [report[0] for report in reports]
    assert done == sorted(done) and done[-1] == reports[-1][1] == 12


PLUGIN = """
from fsbench.provider import Capabilities, Kind, Provider, Tuning

def build(problem, weight, config="b"):
    if config == "large":
        raise RuntimeError("out of resource")

    def launch(hidden, seed, offset):
        return (hidden.float() @ weight.float().T).argmax(1)

    return launch

PROVIDER = Provider(
    name="mine", label="Mine", kind=Kind.{kind}, build=build,
    capabilities=Capabilities(devices=("cpu",)),
    tuning=Tuning(
        "mine", (4, 8), lambda problem: ["b", "a", "large"][-{configs}:], build,
        lambda gpu, record, rows: f"rows = {{len(rows)}}\\n",
    ),
)
"""


@pytest.fixture
def fsbench(monkeypatch, capsys, tmp_path):
    """Call the console script in a new folder; return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["fsbench", "tune", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        out, err = capsys.readouterr()
        return exit_.value.code or 0, out, err

    return call


@pytest.fixture
def plugin(monkeypatch, tmp_path):
    """On a machine whose only device is the CPU, which can be tuned there."""
    monkeypatch.setattr(tune, "_device", lambda: "cpu")

    def write(configs=3, kind="GREEDY"):
        (tmp_path / "mine.py").write_text(PLUGIN.format(configs=configs, kind=kind))
        return ["--provider-path", "mine.py", "--timer", "fake", "--d", "32", "--v", "100"]

    return write


@pytest.mark.full
def test_files_and_table(fsbench, plugin, tmp_path):
    code, out, err = fsbench(*plugin(), "--kernel", "mine", "--batch", "4,8", "--out", "tuned")
    assert code == 0, err
    assert "mine" in out and "the same" in out and "Wrote tuned/times.csv" in out
    assert "FSBENCH_TILES=tuned/tiles.toml" in out
    with open(tmp_path / "tuned" / "times.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["b"], row["config"]) for row in rows if row["note"]] == [
        ("4", "large"),
        ("8", "large"),
    ]
    timed = [row for row in rows if not row["note"]]
    assert {row["config"] for row in timed} == {"a", "b"}
    assert all(float(row["median_us"]) > 0 for row in timed)
    assert {row["config"] for row in rows if row["in_use"] == "True"} == {"b"}
    assert (tmp_path / "tuned" / "tiles.toml").read_text() == "rows = 2\n"
    assert json.loads((tmp_path / "tuned" / "env.json").read_text())["device"] == "cpu"


@pytest.mark.full
def test_a_bucket_without_a_choice_sets_the_exit_code(fsbench, plugin):
    code, out, _ = fsbench(*plugin(configs=1), "--batch", "4", "--limit", "1")
    assert code == 3 and "none" in out


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        ("--kernel hoper", 2, "--kernel: expected one of hopper, mine, portable, portable-token"),
        ("--kernel hopper", 4, "flash_sampling_hopper: runs on cuda only"),
        ("--batch 4,5", 2, "--batch: expected buckets of mine: 4, 8; got 5"),
        ("--batch x", 2, "--batch: expected integers from 1"),
    ],
)
def test_mistakes_are_one_line(fsbench, plugin, arguments, code, line):
    words, _, err = fsbench(*plugin(), *arguments.split())
    assert words == code
    assert err.startswith(f"error: {line}") and len(err.splitlines()) == 1


def test_without_a_gpu_or_a_kernel_it_ends_with_the_reason(fsbench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reason = "error: tune: torch sees no CUDA device; `fsbench doctor` says why\n"
    assert fsbench() == (4, "", reason)
    monkeypatch.setattr(tune, "_device", lambda: "cpu")
    code, _, err = fsbench()
    assert code == 4 and err.startswith("error: tune: no kernel can run here")
