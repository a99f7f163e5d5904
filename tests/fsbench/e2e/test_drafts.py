"""`fsbench e2e --speculate`, with the tiny random model on the CPU."""

from __future__ import annotations

import json

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from fsbench.cli import app
from fsbench.e2e.measure import DecodePlan
from fsbench.e2e.models import decoder
from fsbench.errors import InvalidArgument, InvalidOption

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = DecodePlan((decoder("tiny"),), (3,), ("flash_sample",), prompt_tokens=5, output_tokens=12,
            dtype="bfloat16")  # fmt: skip
CPU = torch.device("cpu")


def start(*arguments: str):
    small = [
        *("e2e", "--device", "cpu", "--model", "tiny", "--batch", "3", "--runs", "2"),
        *("--prompt-tokens", "3", "--output-tokens", "12", "--dtype", "bf16", "--profiles", "1"),
    ]
    return CliRunner().invoke(app, [*small, *arguments])


@pytest.fixture(scope="module")
def model():
    from fsbench.e2e.hf import random_model  # loads transformers

    return random_model(decoder("tiny"), PLAN, CPU)


def decoding(model, k: int, drafter=None):
    """(tokens that were drawn, steps) of three requests; one is greedy."""
    from fsbench.integrations.speculating import Decoding

    prompts = torch.arange(15).view(3, 5) + 1
    temperature = torch.tensor([0.0, 0.8, 1.2])
    of = Decoding(model, prompts, temperature, torch.tensor([7, 8, 9]), 17, k, drafter)
    with torch.inference_mode():
        steps = of.run(of.step)
    return of.tokens[:, 5:17].clone(), steps


def test_no_drafter_changes_a_token(model):
    from fsbench.integrations.speculating import EarlyExit, ngram, no_drafts

    plain, steps = decoding(model, 0)
    assert (steps.gained == 1).all() and len(steps.at) == 12
    for drafter in (ngram, no_drafts, EarlyExit(model, 1), EarlyExit(model, 2)):
        found, steps = decoding(model, 3, drafter)
        assert torch.equal(found, plain)
        assert (steps.gained.sum(0) >= 12).all()
        assert (drafter is no_drafts) <= (steps.accepted() == 0)
    assert steps.accepted() == 3, "all layers of the model are the model"
    assert len(steps.at) == 3


def test_hidden_states_are_of_an_attention_that_is_the_same_in_every_run(model, monkeypatch):
    """What torch takes by default gave other hidden states in every run on an H200."""
    allowed = []
    forward = type(model.model).forward

    def watched(self, *given, **named):
        allowed.append(
            (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
        )
        return forward(self, *given, **named)

    monkeypatch.setattr(type(model.model), "forward", watched)
    decoding(model, 0)
    assert set(allowed) == {(False, True)} and len(allowed) == 13
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_ngram_continues_the_longest_and_latest_match():
    from fsbench.integrations.speculating import Decoding, ngram

    rows = torch.tensor([
        [1, 2, 3, 4, 9, 3, 5, 1, 2, 3],  # 1 2 3 stood at the start; 3 alone later
        [7, 1, 8, 2, 7, 1, 9, 2, 7, 1],  # 2 7 1 stood once
        [5, 6, 5, 6, 5, 6, 5, 6, 5, 6],  # its period: what follows ends at the last token
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 0],  # nothing
    ])  # fmt: skip
    made = Decoding.__new__(Decoding)  # no model: a table needs the tokens alone
    made.tokens = torch.nn.functional.pad(rows, (0, 5), value=3)
    made.position, made.columns, made.k = torch.full((4,), 9), torch.arange(15), 3
    assert ngram(made).tolist() == [[4, 9, 3], [9, 2, 7], [5, 6, -1], [-1, -1, -1]]


def test_what_is_reported(tmp_path):
    done = start("--speculate", "3", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "run" / "e2e.csv").set_index("sampler")
    assert list(frame.index) == ["flash_sample", "ngram-3", "early-exit-3"]
    assert (frame.runs == 2).all() and (frame.tokens_per_s > 0).all()
    drafted = frame.loc[["ngram-3", "early-exit-3"]]
    assert (drafted.same_pct == 100).all()
    assert drafted.reduction_pct.isna().all()  # on a CPU the reference draws: no gain is reported
    assert drafted.accepted.between(0, 3).all() and (drafted.draft_us > 0).all()
    assert drafted.draft_draw_pct["ngram-3"] == 0 < drafted.draft_draw_pct["early-exit-3"]
    assert frame.loc["flash_sample"].isna().accepted
    assert "accepted" in done.output and "3 drafts, ngram" in done.output
    assert "### Drafts" in (tmp_path / "run" / "e2e.md").read_text()
    for line in map(json.loads, (tmp_path / "run" / "steps.jsonl").read_text().splitlines()):
        if "decoded" in line:  # while all three decode, the first tokens aside
            run = line["decoded"]
            assert run["tpot_us"] == pytest.approx(
                3 * sum(run["step_us"]) / sum(run["step_tokens"]), rel=0.01
            )
            assert len(run["step_us"]) == len(run["step_tokens"]) >= 2


@pytest.mark.parametrize(
    ("missing", "reason"),
    [(-1, "tokens: expected those of decoding without"), (0, "tokens: expected no missing draft")],
)
def test_drafts_that_change_a_token_fail_by_name(tmp_path, monkeypatch, missing, reason):
    """Tokens that were not drawn are accepted; missing drafts too, as token 0, or not."""
    import fsbench.integrations.speculating as speculating

    right = speculating.verify_drafts

    def all_accepted(sampled, drafts):
        last = sampled.view(len(drafts), -1)[:, -1:]
        drafts = ((drafts + 1) % 1000).where(drafts >= 0, missing)  # most were right
        return right(torch.cat([drafts, last], 1), drafts)

    monkeypatch.setattr(speculating, "verify_drafts", all_accepted)
    done = start("--speculate", "2", "--drafter", "early-exit", "--out", str(tmp_path / "run"))
    assert done.exit_code == 3
    frame = pd.read_csv(tmp_path / "run" / "e2e.csv").set_index("sampler")
    assert frame.loc["flash_sample"].runs == 2
    assert reason in frame.loc["early-exit-2"].reason


def test_rounding_by_shape_is_told_from_a_wrong_token(tmp_path, monkeypatch):
    """Passes over several tokens see other logits: then the passes without drafts are compared."""
    import fsbench.integrations.speculating as speculating

    right = speculating.Decoding.draw

    def by_shape(self, hidden, k, position):
        return (right(self, hidden, k, position) + (k > 0)).clamp_max(999)

    monkeypatch.setattr(speculating.Decoding, "draw", by_shape)
    done = start("--speculate", "2", "--drafter", "early-exit", "--out", str(tmp_path / "run"))
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(tmp_path / "run" / "e2e.csv").set_index("sampler")
    assert frame.loc["early-exit-2"].same_pct < 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speculate", "0"], "--speculate: expected an integer from 1"),
        (["--speculate", "11"], "--speculate: expected at most 10, two less than --output-tokens"),
        (
            ["--speculate", "2", "--engine", "vllm", "--sampler", "greedy"],
            "--sampler: expected vllm, flash_sample, screened with --speculate; got 'greedy'",
        ),
        (
            ["--speculate", "2", "--engine", "vllm", "--drafter", "ngram"],
            "--drafter: expected eagle in vllm; got 'ngram'",
        ),
        (["--speculate", "2", "--drafter", "ngrams"], "--drafter: expected one of"),
        (["--model", "qwen3-8b-fp8"], "--model: expected none in fp8 with --engine hf"),
        (["--speculate", "2", "--sampler", "multinomial"], "--sampler: expected flash_sample with"),
        (["--drafter", "ngram"], "--drafter: expected --speculate with it"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_written(tmp_path, arguments, message):
    done = start(*arguments, "--out", str(tmp_path / "run"))
    assert message in (str(done.exception) + done.output)
    assert isinstance(done.exception, InvalidArgument | InvalidOption)
    assert not (tmp_path / "run").exists()


@pytest.mark.gpu
def test_on_a_gpu_graphs_change_no_token(tmp_path):
    arguments = ["e2e", "--model", "tiny", "--batch", "3", "--runs", "1", "--speculate", "3"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
