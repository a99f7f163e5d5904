"""The decode loop over transformers, with a tiny random model on the CPU."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from fsbench.e2e.measure import DecodePlan
from fsbench.e2e.models import decoder
from fsbench.errors import EngineUnavailable
from fsbench.integrations.draw import Head, make_draw
from fsbench.kernels import flash_sample

if TYPE_CHECKING:
    from fsbench.e2e.hf import HfBatch

pytestmark = pytest.mark.usefixtures("one_thread")
PLAN = DecodePlan((decoder("tiny"),), (3,), ("flash_sample",), prompt_tokens=5, output_tokens=6,
            dtype="bfloat16")  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    from fsbench.e2e.hf import random_model  # loads transformers

    return random_model(decoder("tiny"), PLAN, CPU)


def decoded(model, B: int, draw) -> HfBatch:
    from fsbench.e2e.hf import HfBatch

    batch = HfBatch(model, PLAN, B, CPU)
    batch.decode(lambda: batch.step(draw))
    return batch


def recording(draw, seen: list):
    def record(rows):
        drawn = draw(rows)
        hidden, _, seed, offset, *_ = rows
        seen.append((hidden.clone(), seed.clone(), int(offset[0]), drawn.tokens.clone()))
        return drawn

    return record


def test_tokens_are_those_of_flash_sample_called_directly(model):
    weight, seen = model.lm_head.weight.detach(), []
    batch = decoded(model, 3, recording(make_draw("flash_sample", Head(weight, 1000)), seen))
    assert [offset for *_, offset, _ in seen] == list(range(4, 10))
    for step, (hidden, seed, offset, tokens) in enumerate(seen):
        direct = flash_sample(hidden, weight, seed=seed, offset=torch.tensor([offset])).tokens
        assert torch.equal(tokens, direct)
        assert torch.equal(batch.sequence[:, 5 + step], direct)


def test_hidden_states_are_those_of_the_model_without_a_cache(model):
    """Of the finished sequences, fed at once."""
    seen: list = []
    head = Head(model.lm_head.weight.detach(), 1000)
    batch = decoded(model, 3, recording(make_draw("flash_sample", head), seen))
    with torch.inference_mode():
        whole = model.model(input_ids=batch.sequence).last_hidden_state
    for hidden, _, offset, _ in seen:
        assert torch.allclose(hidden, whole[:, offset], atol=0.05, rtol=0.05)


def test_every_decoding_starts_from_the_prompts(model):
    draw = make_draw("flash_sample", Head(model.lm_head.weight.detach(), 1000))
    batch = decoded(model, 2, draw)
    first = batch.sequence.clone()
    again = batch.decode(lambda: batch.step(draw))
    assert torch.equal(batch.sequence, first)
    assert len(again.step_us) == 5 and all(us > 0 for us in again.step_us)
    assert again.tpot_us == pytest.approx(sum(again.step_us) / 5, rel=0.01)


def test_a_baseline_decodes_too(model):
    batch = decoded(model, 2, make_draw("multinomial", Head(model.lm_head.weight.detach(), 1000)))
    drawn = batch.sequence[:, 5:]
    assert ((drawn >= 0) & (drawn < 1000)).all() and drawn.unique().numel() > 2


def test_a_profile_has_all_parts_and_only_what_matters_is_on_stderr(model, capfd):
    baseline = make_draw("multinomial", Head(model.lm_head.weight.detach(), 1000))

    def draw(rows):
        os.write(2, b"a warning\n")
        return baseline(rows)

    batch = decoded(model, 2, draw)
    capfd.readouterr()
    found = batch.profile(draw)
    # One draw before the recording begins, five inside.
    assert capfd.readouterr().err == 6 * "a warning\n"
    assert found.steps == 4
    # Timed one after the other on a machine that others use: no order among them is sure.
    assert min(found.matmul_us, found.draw_us, found.busy_us) > 0


def test_transformers_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    spec = importlib.util.find_spec("fsbench.e2e.hf")
    without = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(without)
    with pytest.raises(EngineUnavailable, match=r"expected transformers 4\.51 or later"):
        without.HuggingFace("cpu")


@pytest.mark.gpu
def test_on_a_gpu_a_graph_draws_what_eager_steps_draw():
    from fsbench.e2e.hf import HfBatch, random_model

    cuda = torch.device("cuda")
    model = random_model(decoder("tiny"), PLAN, cuda)
    draw = make_draw("flash_sample", Head(model.lm_head.weight.detach(), 1000))
    batch = HfBatch(model, PLAN, 3, cuda)
    replay = batch.compiled(draw)
    batch.decode(replay)
    graph = batch.sequence.clone()
    batch.decode(lambda: batch.step(draw))
    assert torch.equal(batch.sequence, graph)
    assert batch.profile(draw).draw_us > 0
