"""`fsbench e2e` as a user starts it, on the CPU with the tiny model."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.errors import EngineUnavailable, InvalidArgument

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = [
    *("e2e", "--device", "cpu", "--model", "tiny", "--batch", "1,3", "--runs", "2"),
    *("--profiles", "1"),
    # In bf16 flash_sample is its reference; in fp32 the kernel would be interpreted, a minute.
    *("--prompt-tokens", "3", "--output-tokens", "6", "--dtype", "bf16"),
]


def start(*arguments: str):
    return CliRunner().invoke(app, [*SMALL, *arguments])


def test_everything_is_written(tmp_path):
    done = start("--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "run" / "e2e.csv")
    measured = frame[frame.runs > 0]
    assert {(row.b, row.baseline) for row in measured.itertuples()} == {
        *((1, True), (1, False), (3, True), (3, False))
    }
    assert (measured.runs == 2).all() and (measured.tpot_ms > 0).all()
    assert measured.draw_us.notna().all()
    assert measured.reduction_pct.isna().all() and measured.amdahl_pct.isna().all()
    facts = json.loads((tmp_path / "run" / "env.json").read_text())
    assert facts["engine"] == "hf" and facts["device"] == "cpu" and facts["argv"]
    assert "FlashSampling (reference, on a CPU)" in done.output
    assert (tmp_path / "run" / "tpot_hf.png").stat().st_size > 1000
    assert "| ---" in (tmp_path / "run" / "e2e.md").read_text()
    assert "saved" not in done.output and "%" not in done.output
    assert "runs its reference" in done.output
    assert "head + sampling" in done.output and "|" not in done.output and "#" not in done.output


def test_figures_are_drawn_again_from_several_folders(tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder, sampler in zip(folders, ("multinomial", "flash_sample"), strict=True):
        assert start("--sampler", sampler, "--batch", "1", "--out", folder).exit_code == 0
    arguments = ["plot", *folders, "--out", str(tmp_path / "plots"), "--format", "svg"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    drawn = (tmp_path / "plots" / "tpot_hf.svg").read_text()
    assert "Multinomial" in drawn and "FlashSampling" in drawn
    none = ["plot", folders[0], "--figure", "runtime", "--out", str(tmp_path / "none")]
    assert "--figure: expected one that" in str(CliRunner().invoke(app, none).exception)
    assert not (tmp_path / "none").exists()


def test_what_cannot_run_here_is_a_row_not_a_failure(tmp_path):
    done = start("--sampler", "multinomial,flash_sampling_hopper", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "run" / "e2e.csv").set_index("sampler")
    assert frame.loc["flash_sampling_hopper"].status == "unavailable"
    assert "runs on cuda only" in frame.loc["flash_sampling_hopper"].reason


def test_a_sampler_that_fails_gives_exit_code_3(tmp_path, monkeypatch):
    import fsbench.integrations.draw as draw

    def broken(self, hidden, *rest):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(draw.FlashSampleDraw, "__call__", broken)
    done = start("--sampler", "multinomial,flash_sample", "--out", str(tmp_path / "run"))
    assert done.exit_code == 3
    frame = pd.read_csv(tmp_path / "run" / "e2e.csv").set_index(["sampler", "b"])
    assert frame.loc[("flash_sample", 1)].reason == "RuntimeError: no kernel image"
    said = (tmp_path / "run" / "steps.jsonl").read_text().count("no kernel image")
    assert said == 2, "once for each B: it is not tried again"
    assert frame.loc[("multinomial", 3)].runs == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--sampler", "matmul_only"], InvalidArgument, "sampler: expected one of"),
        (["--tp", "1,2"], InvalidArgument, "--tp: expected 1 with --engine hf; got 2"),
        (["--engine", "vllm"], EngineUnavailable, "--engine vllm: expected"),
    ],
)
def test_errors_are_named_before_anything_is_written(tmp_path, arguments, error, message):
    done = start(*arguments, "--out", str(tmp_path / "run"))
    assert isinstance(done.exception, error)
    assert message in str(done.exception)
    assert not (tmp_path / "run").exists()
