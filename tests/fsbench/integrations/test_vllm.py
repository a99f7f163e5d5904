"""The vLLM plug-in: what it serves and what it leaves alone."""

from __future__ import annotations

import importlib
import types
from typing import Any

import numpy as np
import pytest
import torch
from fake_vllm import Backed, LMHead, Model, batch
from tree import ROOT

from fsbench.errors import InvalidArgument
from fsbench.integrations import vllm as plugin
from fsbench.integrations.draw import DRAW_MARK, MATMUL_MARK
from fsbench.kernels import flash_sample

D = 64
RUNNER = "vllm.v1.worker.gpu.model_runner"


def loaded(monkeypatch, vllm, name: str = "flash_sample", **parts: Any) -> Any:
    """A runner of the fake, with the plug-in registered and the model loaded."""
    monkeypatch.setenv("FSBENCH_VLLM", name)
    plugin.register()
    runner = vllm[RUNNER].GPUModelRunner(**parts)
    runner.load_model()
    return runner


def states(n: int) -> torch.Tensor:
    """Hidden states [n, D] of the fake model's dtype."""
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1)).bfloat16()


def drawn(runner: Any, rows: list[int], **of: Any) -> torch.Tensor:
    """What flash_sample draws for these requests, called directly."""
    weight = runner.model.lm_head.weight
    sampling = runner.sampler.sampling_states
    rows_of = torch.tensor(rows)
    return flash_sample(
        of["hidden"],
        weight,
        temperature=sampling.temperature.gpu[rows_of],
        seed=sampling.seeds.gpu[rows_of],
        offset=9 + rows_of,
        vocab_size=runner.model.logits_processor.org_vocab_size,
        soft_cap=runner.model.logits_processor.soft_cap,
    ).tokens


def test_off_unless_asked_for(vllm):
    before = vars(vllm[RUNNER].GPUModelRunner).copy()
    plugin.register()
    assert vars(vllm[RUNNER].GPUModelRunner) == before


def test_registering_twice_hooks_once(monkeypatch, vllm):
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    plugin.register()
    hooked = vllm[RUNNER].GPUModelRunner.sample
    plugin.register()
    assert vllm[RUNNER].GPUModelRunner.sample is hooked


def test_tokens_are_those_of_flash_sample(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    runner.sampler.sampling_states.temperature = Backed([0, 0.7, 1, 1.3, 0, 1, 1, 1], np.float32)
    rows = [3, 0, 5, 1]
    hidden = states(7)  # with padding rows behind the batch
    output, num_sampled, num_rejected = runner.sample(hidden, batch(rows), None)
    assert torch.equal(output.sampled_token_ids[:, 0], drawn(runner, rows, hidden=hidden[:4]))
    assert output.sampled_token_ids.shape == (4, 1)
    assert output.logprobs_tensors is None and output.num_nans is None
    assert num_sampled.tolist() == [1] * 4 and num_rejected.tolist() == [0] * 4
    logits = (hidden.float() @ runner.model.lm_head.weight.float().T)[1, :700]
    assert output.sampled_token_ids[1, 0] == logits.argmax()  # row 0 of the states is greedy
    assert "sample" not in runner.calls
    assert runner._fsbench.counts.as_dict() == {"served": 4, "left": {}}


def test_of_prompts_the_last_tokens_are_sampled(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    rows, lengths = [2, 6, 1], [1, 4, 3]
    hidden = states(8)
    output, *_ = runner.sample(hidden, batch(rows, lengths), None)
    expected = drawn(runner, rows, hidden=hidden[[0, 4, 7]])
    assert torch.equal(output.sampled_token_ids[:, 0], expected)


def test_noise_is_fresh_at_every_position_and_for_every_seed(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    runner.model.lm_head.weight.mul_(0.05)  # nearly flat
    hidden = states(1).repeat(8, 1)
    seen = {
        tuple(runner.sample(hidden, batch(list(range(8)), start=s), None)[0].sampled_token_ids[:, 0]
              .tolist())
        for s in range(20)
    }  # fmt: skip
    assert len(seen) == 20
    assert len({token for row in seen for token in row}) > 100


def test_seeds_and_temperatures_that_change_are_sent_again(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    hidden, rows = states(3), [0, 1, 2]
    plugged = runner._fsbench
    runner.sample(hidden, batch(rows), None)
    kept = plugged._sent[2]
    runner.sample(hidden, batch(rows), None)
    assert plugged._sent[2] is kept
    # Another request takes row 1: the engine writes into its array.
    runner.sampler.sampling_states.seeds.np[1] = 12345
    output, *_ = runner.sample(hidden, batch(rows), None)
    assert torch.equal(output.sampled_token_ids[:, 0], drawn(runner, rows, hidden=hidden))
    runner.sampler.sampling_states.temperature.np[2] = 0
    output, *_ = runner.sample(hidden, batch(rows), None)
    assert torch.equal(output.sampled_token_ids[:, 0], drawn(runner, rows, hidden=hidden))


def _set(path: str, value: Any):
    def change(sampler: Any) -> None:
        *parts, last = path.split(".")
        here = sampler
        for part in parts:
            here = getattr(here, part)
        array = getattr(here, last)
        array[4] = value

    return change


LEFT = {
    "logprobs": [
        _set("sampling_states.num_logprobs", 0),
        _set("logprob_token_ids_state.num_token_ids.np", 2),
    ],
    "penalties": [_set("penalties_state.use_penalty", True)],
    "logit bias": [_set("logit_bias_state.use_logit_bias", True)],
    "bad words": [_set("bad_words_state.num_bad_words.np", 1)],
    "top-k": [_set("sampling_states.top_k.np", 50)],
    "top-p": [_set("sampling_states.top_p.np", 0.9)],
    "min-p": [_set("sampling_states.min_p.np", 0.05)],
    "NaN counts": [lambda sampler: setattr(sampler, "compute_nans", True)],
}


@pytest.mark.parametrize(
    ("reason", "change"), [(reason, change) for reason, all in LEFT.items() for change in all]
)
def test_any_other_batch_goes_through_vllm(monkeypatch, vllm, reason, change):
    runner = loaded(monkeypatch, vllm)
    change(runner.sampler)
    hidden = states(2)
    output, *_ = runner.sample(hidden, batch([4, 2]), None)
    best = (hidden @ runner.model.lm_head.weight.T)[:, :700].argmax(1)
    assert runner.calls[-1] == "sample"
    assert torch.equal(output.sampled_token_ids[:, 0], best)
    if reason != "NaN counts":  # a batch without that request is served
        runner.sample(hidden, batch([1, 2]), None)
        assert runner.calls.count("sample") == 1
        assert runner._fsbench.counts.as_dict() == {"served": 2, "left": {reason: 2}}


def test_structured_output_and_drafts_go_through_vllm(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    runner.sample(states(1), batch([0]), object())
    drafted = batch([0])
    drafted.num_draft_tokens = 1
    runner.sample(states(1), drafted, None)
    assert runner.calls.count("sample") == 2
    assert runner._fsbench.counts.left == {"structured output": 1, "drafts": 1}


def test_rows_whose_prompt_is_not_complete_are_no_tokens(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    runner.req_states.prefill_len.np[5] = 100
    _, num_sampled, _ = runner.sample(states(2), batch([5, 1]), None)
    assert num_sampled.tolist() == [0, 1]
    assert runner._fsbench.counts.as_dict() == {"served": 1, "left": {}}


def test_a_row_without_a_finite_logit_gets_token_0(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    hidden = states(2)
    hidden[0, 3] = float("nan")
    output, *_ = runner.sample(hidden, batch([0, 1]), None)
    assert output.sampled_token_ids[0, 0] == 0
    assert output.sampled_token_ids[1, 0] == drawn(runner, [0, 1], hidden=hidden)[1]


def test_a_thousand_mixed_requests(monkeypatch, vllm):
    """Greedy, sampled and penalised requests come and go; nobody's tokens depend on the others."""
    runner = loaded(monkeypatch, vllm)
    sampling, random = runner.sampler.sampling_states, np.random.default_rng(5)
    sampling.temperature = Backed(random.choice([0, 0.5, 1, 2], 8), np.float32)
    tokens = 0
    for _ in range(250):
        rows = random.permutation(8)[: random.integers(1, 9)].tolist()
        runner.sampler.penalties_state.use_penalty[:] = random.random(8) < 0.05
        row = int(random.integers(8))  # one is cancelled, another takes its place
        sampling.seeds.np[row] = random.integers(-(2**63), 2**63)
        sampling.temperature.np[row] = random.choice([0, 0.5, 1, 2])
        hidden = torch.from_numpy(random.standard_normal((len(rows), D))).bfloat16()
        output, *_ = runner.sample(hidden, batch(rows), None)
        tokens += len(rows)
        if not runner.sampler.penalties_state.use_penalty[rows].any():
            for at, each in enumerate(rows):
                alone = drawn(runner, [each], hidden=hidden[at : at + 1])
                assert output.sampled_token_ids[at, 0] == alone[0]
    counts = runner._fsbench.counts
    assert counts.served + counts.left["penalties"] == tokens
    assert counts.left["penalties"] > 0 and tokens >= 1000


def test_a_soft_cap_is_applied(monkeypatch, vllm):
    model = Model()
    model.logits_processor.soft_cap = 2.0
    runner = loaded(monkeypatch, vllm, model=model)
    hidden = states(3)
    output, *_ = runner.sample(hidden, batch([0, 1, 2]), None)
    assert "sample" not in runner.calls
    expected = drawn(runner, [0, 1, 2], hidden=hidden)
    assert torch.equal(output.sampled_token_ids[:, 0], expected)


class Shifted(Model):
    """Its logits are not hidden @ weight.T."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden_states + 1)


def _quantised() -> Model:
    model = Model()
    model.lm_head.quant_method = type("Fp8EmbeddingMethod", (), {})()
    return model


def _scaled() -> Model:
    model = Model()
    model.logits_processor.scale = 0.5
    return model


def _headless() -> Model:
    model = Model()
    del model.lm_head
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Shifted, "model: compute_logits"),
        (_quantised, "model: quantised LM head"),
        (_scaled, "model: scaled logits"),
        (_headless, "model: no lm_head.weight and logits_processor"),
        (lambda: Model(dtype=torch.float32), "model: LM head in torch.float32"),
    ],
)
def test_models_it_does_not_understand_are_left_to_vllm(monkeypatch, vllm, model, reason):
    runner = vllm[RUNNER].GPUModelRunner()
    runner.model = model()
    monkeypatch.setenv("FSBENCH_VLLM", "flash_sample")
    plugin.register()
    runner.load_model()
    if reason != "model: no lm_head.weight and logits_processor":
        runner.sample(states(1).to(runner.model.lm_head.weight.dtype), batch([0]), None)
        assert runner.calls[-1] == "sample"
    assert runner._fsbench.declines(runner, batch([0]), None) == reason


def test_lora_is_left_to_vllm(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm, lora_config=object())
    assert runner._fsbench.declines(runner, batch([0]), None) == "model: LoRA"


def test_the_draw_is_captured_before_memory_is_measured(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    draw, captured = runner._fsbench._draw, []
    monkeypatch.setattr(plugin, "GraphedDraw", lambda *arguments: captured.append(arguments))
    runner._dummy_sampler_run(states(6))
    assert "_dummy_sampler_run" in runner.calls
    assert captured == [] and runner._fsbench._draw is draw  # there are no graphs on a CPU
    hidden = types.SimpleNamespace(is_cuda=True, shape=(6, 8))
    runner._fsbench.capture(hidden)
    assert captured == [(draw, 6, hidden)]


def test_workers_tell_their_counts(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm)
    worker = vllm["vllm.v1.worker.gpu_worker"].Worker()
    worker.model_runner = runner
    runner.sample(states(2), batch([0, 1]), None)
    assert worker.fsbench_counts() == {"served": 2, "left": {}}


def test_marks_appear_in_profiles_of_both_ways(monkeypatch, vllm):
    from torch.profiler import profile

    monkeypatch.setenv("FSBENCH_VLLM_MARKS", "1")
    plugin.register()
    runner = vllm[RUNNER].GPUModelRunner()
    runner.load_model()
    with profile() as recorded:
        runner.sample(states(1), batch([0]), None)
    names = [event.name for event in recorded.events()]
    assert DRAW_MARK in names and MATMUL_MARK in names
    assert runner._fsbench.counts.left == {"vLLM's own": 1}


def test_a_rival_serves_batches_of_temperature_one_only(monkeypatch, vllm):
    runner = loaded(monkeypatch, vllm, "multinomial")
    peaked = torch.zeros(2, D, dtype=torch.bfloat16)
    peaked[0], peaked[1] = runner.model.lm_head.weight[17] * 9, runner.model.lm_head.weight[23] * 9
    output, *_ = runner.sample(peaked, batch([0, 1]), None)
    assert output.sampled_token_ids[:, 0].tolist() == [17, 23]
    assert "sample" not in runner.calls
    runner.sampler.sampling_states.temperature.np[1] = 0.5
    runner.sample(peaked, batch([0, 1]), None)
    assert runner._fsbench.counts.as_dict() == {"served": 2, "left": {"temperature": 2}}


def test_an_unknown_sampler_is_named(monkeypatch, vllm):
    monkeypatch.setenv("FSBENCH_VLLM", "flash_smaple")
    with pytest.raises(InvalidArgument, match=r"FSBENCH_VLLM: expected flash_sample.*flash_smaple"):
        plugin.register()


def test_the_entry_point_is_declared():
    """vLLM finds it by this group."""
    import tomllib

    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = config["project"]["entry-points"]["vllm.general_plugins"]["fsbench"]
    module, _, name = declared.partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_a_sharded_head_is_drawn_from_by_all_ranks(monkeypatch, vllm):
    """The shard of the fake is the whole head of one rank; its columns are compared by index."""
    model = Model(padding=0)
    model.lm_head = LMHead(model.lm_head.weight[100:], 600)
    model.lm_head.shard_indices.org_vocab_start_index = 100
    model.lm_head.shard_indices.org_vocab_end_index = 700
    whole = Model(padding=0)
    monkeypatch.setattr(model, "compute_logits", whole.compute_logits, raising=False)
    assert plugin._is_matmul(model, model.lm_head, None, 700)
    model.lm_head.shard_indices.org_vocab_start_index = 90
    model.lm_head.shard_indices.org_vocab_end_index = 690
    assert not plugin._is_matmul(model, model.lm_head, None, 700)
