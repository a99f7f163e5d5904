"""The measuring at small sizes, and the commands: what they write, print, read and refuse."""

from __future__ import annotations

import json
import os
import time
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch
from tree import ROOT
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.errors import InvalidArgument, ResultsError
from fsbench.machine import hardware
from fsbench.records.store import read_environment
from fsbench.simple import bench, native
from fsbench.simple.controls import PLAIN, PRODUCTION, Controls
from fsbench.simple.plane import uniforms
from fsbench.simple.reference import decide, penalised
from fsbench.simple.steps import FullV, Offload, Parallel, Shvs, probabilities
from fsbench.simple.zipf import ZipfText

pytestmark = [
    pytest.mark.skipif(bool(native.missing()), reason=str(native.missing())),
    pytest.mark.usefixtures("one_thread"),
]

V = 3000
TEXT = ZipfText(V, knee=300)


def fsbench(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `fsbench hotvocab bench` leaves, at a size of seconds."""
    out = tmp_path_factory.mktemp("hotvocab")
    fsbench(
        *("hotvocab", "bench", "--v", V, "--rows", 8, "--repeats", 5, "--rounds", 2),
        *("--samplers", "1,2", "--device", "cpu", "--out", out),
    )
    return out


def test_bench_writes_every_table(folder):
    steps = pd.read_csv(folder / "steps.csv")
    assert list(steps.controls) == ["plain"] * 4 + ["production"] * 4
    assert (steps.rows_per_s > 0).all()
    assert steps.rows_per_s.to_numpy() == pytest.approx(1e6 / steps.row_us, rel=1e-4)
    assert list(steps.times_first[steps.design == "full-V port"]) == [1, 1]
    assert list(steps.settled.notna()) == [name == "SHVS" for name in steps.design]
    assert steps.settled.dropna().between(0, 1).all()
    scaling = pd.read_csv(folder / "scaling.csv")
    assert list(scaling.samplers) == [1, 2, 1, 2]
    assert list(scaling.efficiency[scaling.samplers == 1]) == [1, 1]
    assert list(pd.read_csv(folder / "penalties.csv").seen) == [0, 64, 512, 4096]
    assert list(pd.read_csv(folder / "ring.csv").b) == [1, 16, 256]
    scans = pd.read_csv(folder / "scans.csv")
    assert scans.h.is_monotonic_increasing and scans.h.iloc[-1] == V
    assert scans.hits.iloc[-1] == 1 and (scans.hits.diff().dropna() >= 0).all()
    facts = read_environment(folder)
    assert facts["isa"] in native.ISAS and 0 <= facts["others_cores"] < 1000
    for name in ("ablation", "sizing", "scaling"):
        assert (folder / f"simple_{name}.png").stat().st_size > 10_000


def test_size_reads_the_folder_and_takes_other_constants(folder):
    own = fsbench("hotvocab", "size", folder)
    assert "F2, hot always scanned" in own and "measured" in own
    # The paper's constants: a line is 40 times slower, the best H about the same.
    paper = fsbench("hotvocab", "size", folder, "--c-us", 0.0106, "--c0-us", 8.55)
    assert "c = 10.6000 ns per token" in paper and "measured" not in paper
    with pytest.raises(InvalidArgument, match="--c-us: expected together"):
        fsbench("hotvocab", "size", folder, "--c-us", 1)


def test_plot_draws_again(folder, tmp_path):
    fsbench("hotvocab", "plot", folder, "--out", tmp_path, "--format", "png,svg")
    names = {path.name for path in tmp_path.iterdir()}
    wanted = {"simple_ablation", "simple_sizing", "simple_scaling"}
    assert names == {f"{name}.{suffix}" for name in wanted for suffix in ("png", "svg")}
    assert (tmp_path / "simple_sizing.png").read_bytes() == (
        folder / "simple_sizing.png"
    ).read_bytes()


def test_fit_on_a_trace_of_the_users_own(tmp_path):
    np.save(tmp_path / "trace.npy", TEXT.trace(range(16), 200))
    out = tmp_path / "fit"
    fsbench(
        *("hotvocab", "fit", "--v", V, "--rows", 8, "--repeats", 5),
        *("--trace", tmp_path / "trace.npy", "--out", out),
    )
    facts = json.loads((out / "fit.json").read_text())
    assert facts["trace"] == "trace.npy" and facts["mean"][-1] == 1
    assert pd.read_csv(out / "scans.csv").row_us.isna().all()


def test_exact_finds_no_difference_and_bounds_it(tmp_path):
    fsbench("hotvocab", "exact", "--v", V, "--hot", 300, "--steps", 8, "--out", tmp_path)
    table = pd.read_csv(tmp_path / "variation.csv")
    assert set(table.controls) == {"plain", "production"} and len(table) == 16
    assert table.mean_distance.max() < 1e-3
    assert table.mean_distance_below.min() == pytest.approx(1 - 0.05 ** (1 / 2048), rel=0.5)


def test_exact_finds_a_sampler_that_is_not(monkeypatch):
    """Statistics of the tail that are too small by a half move mass to the hot tokens."""
    honest = Shvs.supply

    def supply(self):
        honest(self)
        self.plane.ring.tail_sum *= 0.5

    monkeypatch.setattr(Shvs, "supply", supply)
    order = torch.arange(V)
    setup = bench.Setup(V, 300, order, TEXT.logits(16))
    plain = [row for row in bench.variation(setup, 8) if row["controls"] == "plain"]
    assert plain[-1]["mean_distance"] > 0.02


def test_pipeline_with_measured_times(folder):
    run = "results/h200/lean-20261123"
    os.chdir(ROOT)
    rows = json.loads(
        fsbench(
            *("hotvocab", "pipeline", "--run", run, "--sampler", "mine:5:60:100"),
            *("--stages", 2, "--json"),
        )
    )
    assert {row["in_flight"] for row in rows} == {2, 3, 4}
    mine = [row for row in rows if row["sampler"] == "mine"]
    assert [row["cycle_us"] for row in mine] == pytest.approx([2082.5, 2005, 2005])
    assert mine[0]["enough_in_flight"] == 3
    fused = min(rows, key=lambda row: row["on_stage_us"])
    assert fused["on_stage_us"] < 0 and fused["times_fastest"] == pytest.approx(1)
    text = fsbench("hotvocab", "pipeline", "--plane", folder, "--v", V, "--stages", 2)
    assert "SHVS" in text and "tokens/s" in text


def test_pipeline_refuses_what_it_cannot_use(folder, tmp_path):
    for arguments, message in [
        ([], "--sampler: expected at least one"),
        (["--plane", folder], "expected V=151936; it has 3000"),
        (["--plane", tmp_path], "expected a folder of `fsbench hotvocab bench`"),
        (["--run", "results/h200/lean-20261123", "--batch", 3], "expected exact samplers"),
    ]:
        with pytest.raises((InvalidArgument, ResultsError), match=message):
            fsbench("hotvocab", "pipeline", *arguments)


def test_settled_rows_are_those_whose_kept_tokens_are_hot():
    logits = torch.full((4, 64), -20.0)
    logits[0, :4] = 1.0  # top-2 is hot
    logits[1, 40] = 1.0  # is not
    logits[2, [3, 40]] = 1.0  # is half
    logits[3, :2], logits[3, 40] = 1.0, 0.9  # is, by little
    setup = bench.Setup(64, 8, torch.arange(64), logits)
    assert bench.settled(setup, Controls(top_k=2)) == 0.5
    assert bench.settled(setup, Controls(top_k=3)) == 0.25
    assert bench.settled(setup, Controls(min_p=0.95)) == 0.5
    assert bench.settled(setup, Controls(min_p=0.5)) == 0.25


def test_cases_take_turns():
    calls = []
    cases = [bench.Case(name, lambda name=name: calls.append(name), 2) for name in "ab"]
    bench.interleave(cases, 3, round_s=0)
    assert "".join(calls) == "ab" + "ab" * 3
    assert [len(case.samples_us) for case in cases] == [3, 3]
    cases[0].samples_us, cases[1].samples_us = [2.0, 4.0, 9.0], [1.0, 2.0, 3.0]
    assert bench.ratio(*cases) == 2


def test_the_time_of_processes_is_told_apart():
    began, before = time.process_time(), hardware.cpu_seconds()
    while time.process_time() - began < 0.3:
        pass  # busy ourselves, for as long as it takes: others may have the processors
    busy, own = (b - a for a, b in zip(before, hardware.cpu_seconds(), strict=True))
    assert 0.2 < own < 0.6 and busy >= own - 0.05


def test_sampler_counts():
    assert bench.sampler_counts(1) == [1]
    assert bench.sampler_counts(2) == [1, 2]
    assert bench.sampler_counts(12) == [1, 2, 4, 8, 12]
    assert bench.sampler_counts(16) == [1, 2, 4, 8, 16]


def oracle(controls, uniform, history):
    logits = TEXT.logits(len(uniform))
    if controls.penalises:
        logits = penalised(logits, *zip(*history, strict=True), **controls.penalties)
    return decide(logits, uniform, **controls.law)


HISTORY = [([1, 2, 3, row], [row, row, 7]) for row in range(64)]
CONTROLS = pytest.mark.parametrize("controls", [PLAIN, PRODUCTION, Controls(temperature=0.0)])


@CONTROLS
def test_probabilities_in_torch_are_the_oracles(controls):
    """What the first two designs draw from, penalties included."""
    p, undefined = probabilities(TEXT.logits(6), HISTORY[:6], controls)
    expected = oracle(controls, torch.full((6,), 0.5, dtype=torch.float64), HISTORY[:6])
    assert not undefined.any()
    assert torch.allclose(p.double(), expected.high - expected.low, atol=1e-5)


@CONTROLS
@pytest.mark.parametrize("design", [Parallel, Offload, partial(Shvs, hot=400)])
def test_designs_draw_the_oracles_tokens_step_by_step(design, controls):
    """From uniforms of the step, and with what was drawn before counted."""
    step = design(64, V, controls, 2)
    history = [(prompt, list(output)) for prompt, output in HISTORY]
    for row, seen in enumerate(history):
        if controls.penalises:
            step.begin(row, *seen)
    uniform = torch.empty(64, dtype=torch.float64)
    for number in range(4):
        step.logits.copy_(TEXT.logits(64))
        if isinstance(step, Shvs):
            step.supply()
        tokens = step.tokens(torch.tensor([5]), torch.tensor([number]))
        uniforms(uniform, torch.tensor([5]), torch.tensor([number]))
        assert oracle(controls, uniform, history).accepts(tokens, uniform).all()
        for (_, output), token in zip(history, tokens.tolist(), strict=True):
            output.append(token)


def test_the_engines_sampler_draws_from_its_probabilities():
    torch.manual_seed(0)
    logits = TEXT.logits(1)
    step = FullV(2048, V, PRODUCTION)
    step.logits.copy_(logits.expand(2048, V))
    p, _ = probabilities(logits, [([], [])], PRODUCTION)
    counts = torch.bincount(step.tokens(torch.tensor([0]), torch.tensor([0])), minlength=V)
    assert (counts[p[0] == 0] == 0).all() and int(p.count_nonzero()) > 2
    error = (p[0] * (1 - p[0]) / 2048).sqrt() + 1e-9
    assert ((counts / 2048 - p[0]).abs() / error).max() < 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_k", -1), ("top_p", 0), ("min_p", 2), ("repetition", 0)],
)
def test_controls_out_of_range_are_refused(field, value):
    with pytest.raises(InvalidArgument, match=field):
        Controls(**{field: value})
