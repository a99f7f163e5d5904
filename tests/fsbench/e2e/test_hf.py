"""`fsbench e2e --engine hf`: the decode loop over transformers, with a tiny model on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import replace

import pytest
import torch

from fsbench.e2e.measure import DecodePlan
from fsbench.e2e.models import decoder, with_drafts
from fsbench.errors import EngineFailed, EngineUnavailable
from fsbench.integrations.draw import Head, make_draw
from fsbench.kernels import flash_sample

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = DecodePlan((decoder("tiny"),), (3,), ("flash_sample",), prompt_tokens=5, output_tokens=12,
            dtype="bfloat16")  # fmt: skip
DRAFTS = replace(PLAN, speculate=3, samplers=with_drafts(["ngram", "early-exit"], 3, 12))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    from fsbench.e2e.hf import random_model  # loads transformers

    return random_model(decoder("tiny"), PLAN, CPU)


@pytest.fixture
def session(model, monkeypatch):
    """Return a function that makes a session of the model for a plan."""
    from fsbench.e2e import hf

    monkeypatch.setattr(hf, "random_model", lambda *_: model)
    return lambda plan=PLAN: hf.HfSession(plan, decoder("tiny"), CPU)


def decode(model, k: int = 0, drafter=None, draw=None):
    """Decode three requests, one of them greedy; return (new tokens, steps)."""
    from fsbench.integrations.decode_loop import Decoding

    prompts = torch.arange(15).view(3, 5) + 1
    temperature, seed = torch.tensor([0.0, 0.8, 1.2]), torch.tensor([7, 8, 9])
    decoding = Decoding(model, prompts, temperature, seed, 17, k, drafter, draw)
    with torch.inference_mode():
        steps = decoding.run(decoding.step)
    return decoding.tokens[:, :17].clone(), steps


def test_tokens_and_hidden_states_are_those_of_the_model_without_a_cache(model):
    """Each token is that of flash_sample on the hidden state of the tokens before it."""
    weight, drawn = model.lm_head.weight.detach(), []
    draw = make_draw("flash_sample", Head(weight, 1000))

    def recording(rows):
        result = draw(rows)
        drawn.append((rows, result.tokens.clone()))
        return result

    tokens, _ = decode(model, draw=recording)
    with torch.inference_mode():
        whole = model.model(input_ids=tokens).last_hidden_state
    for step, (rows, sampled) in enumerate(drawn):
        position = 4 + step
        assert rows.seed.tolist() == [7, 8, 9]
        offset = torch.full((3,), position)
        direct = flash_sample(
            rows.hidden, weight, temperature=rows.temperature, seed=rows.seed, offset=offset
        )
        assert torch.equal(sampled, direct.tokens) and torch.equal(tokens[:, position + 1], sampled)
        assert torch.allclose(rows.hidden, whole[:, position], atol=0.05, rtol=0.05)
    assert len(drawn) == 12


def test_no_drafter_changes_a_token(model):
    from fsbench.integrations.decode_loop import EarlyExit, ngram, no_drafts

    plain, steps = decode(model)
    assert (steps.num_tokens == 1).all() and len(steps.times) == 12
    for drafter in (ngram, no_drafts, EarlyExit(model, 1), EarlyExit(model, 2)):
        tokens, steps = decode(model, 3, drafter)
        assert torch.equal(tokens, plain)
        assert (steps.num_tokens.sum(0) >= 12).all()
        assert (drafter is no_drafts) <= (steps.accepted() == 0)
    assert steps.accepted() == 3, "all layers of the model are the model"
    assert len(steps.times) == 3


def test_attention_is_the_same_in_every_run(model, monkeypatch):
    """The default of torch gave other hidden states in every run on an H200."""
    allowed, forward = [], type(model.model).forward

    def watched(self, *args, **kwargs):
        allowed.append(
            (torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
        )
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", watched)
    decode(model)
    assert set(allowed) == {(False, True)} and len(allowed) == 13
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_ngram_continues_the_longest_and_latest_match():
    from fsbench.integrations.decode_loop import Decoding, ngram

    rows = torch.tensor([
        [1, 2, 3, 4, 9, 3, 5, 1, 2, 3],  # 1 2 3 was at the start; 3 alone later
        [7, 1, 8, 2, 7, 1, 9, 2, 7, 1],  # 2 7 1 was there once
        [5, 6, 5, 6, 5, 6, 5, 6, 5, 6],  # its period: what follows ends at the last token
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 0],  # nothing
    ])  # fmt: skip
    decoding = Decoding.__new__(Decoding)  # without a model: only tokens are read
    decoding.tokens = torch.nn.functional.pad(rows, (0, 5), value=3)
    decoding.position, decoding.columns = torch.full((4,), 9), torch.arange(15)
    decoding.k = 3
    assert ngram(decoding).tolist() == [[4, 9, 3], [9, 2, 7], [5, 6, -1], [-1, -1, -1]]


def test_samplers_take_turns_and_every_decoding_starts_from_the_prompts(session):
    made, tokens = session(), {}
    names = ("flash_sample", "multinomial")
    for B in (2, 3):
        for name in names:
            made.prepare(name, B)
            tokens[name] = made._decodings[name][0].tokens[:, :17].clone()
            assert len(tokens[name]) == B and tokens[name][:, 5:].unique().numel() > 2
        for name in names:
            run = made.decode(name, B)
            if name == "flash_sample":  # torch.multinomial takes no seed
                assert torch.equal(made._decodings[name][0].tokens[:, :17], tokens[name])
            assert len(run.step_us) == 11 and min(run.step_us) > 0 and run.step_tokens is None
            assert run.tpot_us == pytest.approx(sum(run.step_us) / 11, rel=0.01)


def test_a_profile_has_all_parts_and_drops_only_notices_from_stderr(session, monkeypatch, capfd):
    made = session()
    made.prepare("multinomial", 2)
    decoding, _ = made._decodings["multinomial"]
    draw = decoding._draw

    def warn(rows):
        os.write(2, b"a warning\n")
        return draw(rows)

    decoding._draw = warn
    capfd.readouterr()
    profile = made.profile("multinomial", 2)
    assert capfd.readouterr().err == 9 * "a warning\n"  # a step before the profile, eight in it
    assert profile.steps == 7
    # Timed one after the other on a machine that others use: their order is not certain.
    assert min(profile.matmul_us, profile.draw_us, profile.busy_us) > 0


def test_a_session_with_drafts(session):
    made = session(DRAFTS)
    for name in DRAFTS.samplers:
        made.prepare(name, 3)
        run, drafting = made.decode(name, 3), made.profile(name, 3)
        # While all three decode, without the first tokens.
        assert run.tpot_us == pytest.approx(3 * sum(run.step_us) / sum(run.step_tokens), rel=0.01)
        if name == "flash_sample":
            assert run.accepted is run.same_pct is drafting is None
        else:
            assert 0 <= run.accepted <= 3 and run.same_pct == 100
            assert drafting.us > 0 and (drafting.draw_us > 0) == name.startswith("early")


@pytest.mark.parametrize(
    ("missing", "reason"),
    [(-1, "tokens: expected those of decoding without"), (0, "tokens: expected no missing draft")],
)
def test_drafts_that_change_a_token_fail(session, monkeypatch, missing, reason):
    """All drafts are accepted, most of them wrong; missing ones are accepted as token 0, or not."""
    from fsbench.integrations import decode_loop

    verify = decode_loop.verify_drafts

    def accept_all(sampled, drafts):
        last = sampled.view(len(drafts), -1)[:, -1:]
        drafts = ((drafts + 1) % 1000).where(drafts >= 0, missing)
        return verify(torch.cat([drafts, last], 1), drafts)

    monkeypatch.setattr(decode_loop, "verify_drafts", accept_all)
    made = session(DRAFTS)
    made.prepare("flash_sample", 3)
    with pytest.raises(EngineFailed, match=reason):
        made.prepare("early-exit-3", 3)
        made.decode("early-exit-3", 3)


def test_rounding_by_shape_is_not_taken_for_a_wrong_token(session, monkeypatch):
    """Passes over several tokens see other logits: passes of that shape are then compared."""
    from fsbench.integrations.decode_loop import Decoding

    draw = Decoding.draw
    monkeypatch.setattr(
        Decoding,
        "draw",
        lambda self, hidden, k, position: (draw(self, hidden, k, position) + (k > 0)) % 1000,
    )
    made = session(DRAFTS)
    for name in ("flash_sample", "early-exit-3"):
        made.prepare(name, 3)
    assert made.decode("early-exit-3", 3).same_pct < 50


def test_transformers_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.find_spec("fsbench.e2e.hf")
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    with pytest.raises(EngineUnavailable, match=r"expected transformers 4\.51 or later"):
        without.HuggingFace("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("plan", [PLAN, DRAFTS], ids=["plain", "drafts"])
def test_graphs_draw_what_eager_steps_draw(plan):
    from fsbench.e2e.hf import HfSession

    made = HfSession(plan, decoder("tiny"), torch.device("cuda"))
    for name in plan.samplers:
        made.prepare(name, 3)
        made.decode(name, 3)
        decoding, _ = made._decodings[name]
        graph = decoding.tokens.clone()
        with torch.inference_mode():
            decoding.run(decoding.step)
        assert torch.equal(decoding.tokens, graph)
        made.profile(name, 3)
