"""`fsbench e2e` as a user starts it, on the CPU with the tiny model."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.errors import EngineUnavailable, InvalidArgument, InvalidOption

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


def test_a_call_that_was_stopped_is_continued(tmp_path, monkeypatch):
    """A run that one sampler lacks is repeated with both; the later of its lines counts."""
    import fsbench.e2e.hf as hf

    folder, decode = tmp_path / "run", hf.HfSession.decode
    begun = []

    def stopped(self, sampler, B, requests):
        begun.append((B, sampler))
        if len(begun) == 4:  # two runs of B = 1, and the first of B = 3 by one sampler
            raise KeyboardInterrupt
        return decode(self, sampler, B, requests)

    monkeypatch.setattr(hf.HfSession, "decode", stopped)
    two = ("--sampler", "flash_sample,multinomial", "--runs", "1")
    done = start(*two, "--out", str(folder))
    assert done.exit_code == 130 and f"fsbench e2e --resume {folder}" in done.output
    assert not (folder / "e2e.csv").exists()

    def resume(*arguments):
        return CliRunner().invoke(app, ["e2e", "--resume", str(folder), *arguments])

    begun.clear()
    monkeypatch.setattr(hf.HfSession, "decode", lambda *a: begun.append(a[2:0:-1]) or decode(*a))
    done = resume()
    assert done.exit_code == 0, done.output
    assert begun == [(3, "flash_sample"), (3, "multinomial")]
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    twice = [line["decoded"]["tpot_us"] for line in lines if "decoded" in line][2:4]
    frame = pd.read_csv(folder / "e2e.csv").set_index(["sampler", "b"])
    assert list(frame.runs) == [1] * 4 and (frame.draw_us > 0).all()
    assert frame.tpot_ms["flash_sample", 3] == pytest.approx(twice[1] / 1e3, rel=1e-4)
    facts = json.loads((folder / "env.json").read_text())
    assert len(facts["resumed"]) == 1 and facts["options"]["batch"] == "1,3"
    before = (folder / "steps.jsonl").read_bytes()
    assert resume().exit_code == 0 and (folder / "steps.jsonl").read_bytes() == before
    other = resume("--out", str(tmp_path / "other"))
    assert "--out: expected without --resume" in str(other.exception)
    (folder / "env.json").write_text(json.dumps({**facts, "cpu": "another"}))
    assert "was measured on another machine: expected cpu" in str(resume().exception)


def test_drafts_are_reported(tmp_path):
    done = start("--batch", "3", "--speculate", "2", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "run" / "e2e.csv").set_index("sampler")
    assert list(frame.index) == ["flash_sample", "ngram-2", "early-exit-2"]
    assert (frame.runs == 2).all() and (frame.tokens_per_s > 0).all()
    drafted = frame.loc[["ngram-2", "early-exit-2"]]
    assert (drafted.same_pct == 100).all() and (drafted.draft_us > 0).all()
    assert drafted.reduction_pct.isna().all()  # on a CPU the reference draws: no gain is reported
    assert drafted.draft_draw_pct["ngram-2"] == 0 < drafted.draft_draw_pct["early-exit-2"]
    assert frame.loc["flash_sample"].isna().accepted
    assert "accepted" in done.output and "2 drafts, ngram" in done.output
    assert "### Drafts" in (tmp_path / "run" / "e2e.md").read_text()
    before = (tmp_path / "run" / "steps.jsonl").read_bytes()
    done = CliRunner().invoke(app, ["e2e", "--resume", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == before  # nothing is missing


def test_samplers_that_are_unavailable_or_fail_are_rows(tmp_path, monkeypatch):
    """The exit code is 3 if one has failed; one that cannot run here is no failure."""
    import fsbench.integrations.draw as draw

    def broken(self, rows):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(draw.FlashSampleDraw, "__call__", broken)
    samplers = "multinomial,flash_sampling_hopper"
    assert start("--batch", "1", "--sampler", samplers, "--out", str(tmp_path / "a")).exit_code == 0
    done = start("--sampler", f"{samplers},flash_sample", "--out", str(tmp_path / "b"))
    assert done.exit_code == 3
    frame = pd.read_csv(tmp_path / "b" / "e2e.csv").set_index(["sampler", "b"])
    absent = frame.loc["flash_sampling_hopper"].iloc[0]
    assert absent.status == "unavailable" and "runs on cuda only" in absent.reason
    assert frame.loc[("flash_sample", 1)].reason == "RuntimeError: no kernel image"
    lines = (tmp_path / "b" / "steps.jsonl").read_text()
    assert lines.count("no kernel image") == 2  # once for each B: it is not tried again
    assert frame.loc[("multinomial", 3)].runs == 2


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ("--sampler matmul_only", InvalidArgument, "sampler: expected one of"),
        ("--tp 1,2", InvalidArgument, "--tp: expected 1 with --engine hf; got 2"),
        ("--engine vllm", EngineUnavailable, "--engine vllm: expected"),
        ("--speculate 0", InvalidOption, "--speculate: expected an integer from 1"),
        ("--speculate 5", InvalidArgument,
         "--speculate: expected at most 4, two less than --output-tokens"),
        ("--speculate 2 --engine vllm --sampler greedy", InvalidArgument,
         "--sampler: expected vllm, flash_sample, screened with --speculate; got 'greedy'"),
        ("--speculate 2 --engine vllm --drafter ngram", InvalidArgument,
         "--drafter: expected eagle in vllm; got 'ngram'"),
        ("--speculate 2 --drafter ngrams", InvalidArgument, "--drafter: expected one of"),
        ("--model qwen3-8b-fp8", InvalidArgument,
         "--model: expected none in fp8 with --engine hf"),
        ("--speculate 2 --sampler multinomial", InvalidArgument,
         "--sampler: expected flash_sample with"),
        ("--drafter ngram", InvalidArgument, "--drafter: expected --speculate with it"),
    ],
)  # fmt: skip
def test_errors_are_named_before_anything_is_written(tmp_path, arguments, error, message):
    done = start(*arguments.split(), "--out", str(tmp_path / "run"))
    assert isinstance(done.exception, error)
    assert message in str(done.exception) + done.output
    assert not (tmp_path / "run").exists()
