"""Requests of every kind in a fake of vLLM: their tokens, log-probabilities and counters."""

from __future__ import annotations

import pytest
import torch
from fake_vllm import Model
from fake_vllm_states import NO_LOGPROBS, D, V, params
from vllm_play import (
    BY_VLLM,
    GRAMMAR,
    KINDS,
    PROMPT,
    Play,
    Recording,
    grammars,
    hidden_state,
    request,
)

from fsbench.integrations import vllm_0_26 as adapter

WITH_LOGPROBS = [kind for kind in KINDS if kind.endswith("logprobs")]


def decode(runner, request_kinds, steps, dtype=torch.bfloat16, neighbors=()):
    """Decode requests of these kinds, eight at a time; return tokens and log-probabilities."""
    play, tokens = Play(runner, dtype), {}
    for first in range(0, len(request_kinds), 8):
        group = request_kinds[first : first + 8]
        for number, kind in enumerate(neighbors):
            play.add(f"neighbor {number}", request(kind, number), [20 + number, 21])
        for kind in group:
            play.add(kind, request(kind, list(KINDS).index(kind)), PROMPT)
        for step in range(steps):
            names = list(play.slots)
            turn = step % len(names)
            play.step(names[turn:] + names[:turn], grammars(group))
        tokens |= {name: play.remove(name)[1] for name in list(play.slots)}
    return {kind: tokens[kind] for kind in request_kinds}, play.logprobs


@pytest.mark.parametrize("kind", ["plain", "frequency", "default"])
def test_tokens_do_not_depend_on_whether_the_screened_head_draws(load, screens, kind):
    """Alone, with a request that joins it, and with more than the screen takes."""
    runner = load("screened")
    alone, _ = decode(runner, [kind], 3)
    for neighbors in (["plain"], ["plain"] * 5, ["plain", "top logprobs"]):
        assert decode(runner, [kind], 3, neighbors=neighbors)[0] == alone
    assert decode(load(), [kind], 3)[0] != alone or kind == "default"
    assert set(screens) == ({1, 2} if kind != "default" else set())


@pytest.mark.full
def test_tokens_of_the_kernels_do_not_depend_on_the_batch(load):
    """In fp16 the interpreter runs the kernels; in bf16 the reference draws."""
    request_kinds = [
        "plain",
        "default",
        "frequency",
        "repetition",
        "grammar",
        "default logprobs",
        "greedy",
    ]
    runner = load(model=Model(dtype=torch.float16))
    together, _ = decode(runner, request_kinds, 2, torch.float16)
    for kind in request_kinds:
        assert decode(runner, [kind], 2, torch.float16)[0] == {kind: together[kind]}


def test_vllm_samples_the_unsupported_rows_of_a_batch_and_no_others(load):
    runner = load()
    play = Play(runner)
    runner.sampler.logprobs_mode = "raw_logits"
    for kind in ("plain", "top logprobs", "default", "tempered logprobs", "greedy"):
        play.add(kind, request(kind), PROMPT)
    output = play.step()
    assert runner.sample_calls() == [["top logprobs", "tempered logprobs"]]
    counts = runner._fsbench.sampling.counts
    assert counts.served == 3 and counts.unserved == {"logits": 2}
    ids, values, ranks = output.logprobs_tensors[:3]
    assert ids.shape == values.shape == (5, 4) and ids.dtype == torch.int64
    assert torch.equal(ids[:, 0], output.sampled_token_ids[:, 0])
    assert values[[1, 3]].isfinite().all(1).tolist() and ranks[[1, 3]].min() >= 1
    assert (values[[0, 2, 4], 1:] == -torch.inf).all()


def test_log_probabilities_change_no_token(load):
    play = Play(load())
    for kind in WITH_LOGPROBS:
        silent = request(kind)
        silent.logprobs = silent.logprob_token_ids = None
        play.add(kind, request(kind), PROMPT)
        play.add(f"{kind}, silent", silent, PROMPT)
        for _ in range(3):
            play.step(None, grammars(play.slots))
        assert play.remove(kind) == play.remove(f"{kind}, silent"), kind


def vllm_logprobs(runner, hidden, batch, grammar) -> torch.Tensor:
    """Return the log-probabilities that vLLM computes of every token from fp32 logits, [B, V]."""
    logits = hidden[batch.logits_indices].float() @ runner.model.lm_head.weight[:V].float().T
    if grammar is not None:
        runner.structured_outputs_worker.apply_grammar_bitmask(
            *(logits, batch, grammar.structured_output_request_ids, grammar.grammar_bitmask)
        )
    state, slots = runner.sampler.logprob_token_ids_state, batch.idx_mapping_np.tolist()
    saved = list(state.token_ids)
    for slot in slots:
        state.token_ids[slot] = list(range(V))
    values = runner.sampler(logits, batch).logprobs_tensors.logprobs[:, 1:]
    state.token_ids[:] = saved
    return values


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("greedy", [False, True])
def test_log_probabilities_and_ranks_are_vllms(load, mode, greedy):
    """vLLM rounds logits to bf16, so those that it computes itself are less exact."""
    runner = load()
    runner.sampler.logprobs_mode = mode
    play, sample, checked = Play(runner), runner.sample, []

    def check(hidden, batch, grammar):
        output = sample(hidden, batch, grammar)
        expected = vllm_logprobs(runner, hidden, batch, grammar)
        ids, values, ranks = output[0].logprobs_tensors[:3]
        assert torch.equal(ids[:, 0], output[0].sampled_token_ids[:, 0])
        for row, name in enumerate(batch.req_ids):
            p = play.params[name]
            specified = p.logprob_token_ids or []
            n = len(specified) or (NO_LOGPROBS if p.logprobs is None else p.logprobs)
            if n == NO_LOGPROBS:
                continue
            checked.append(name)
            actual, others = values[row, : 1 + n], ids[row, 1 : 1 + n].tolist()
            close = {"atol": 0.08 if name in BY_VLLM else 2e-3, "rtol": 0.0}
            torch.testing.assert_close(actual[:1], expected[row, ids[row, :1]], atol=2e-3, rtol=0)
            torch.testing.assert_close(actual[1:], expected[row, others], **close)
            assert len(set(others)) == n and (not specified or others == specified)
            if not specified:
                torch.testing.assert_close(actual[1:], expected[row].topk(n).values, **close)
            near = expected[row, ids[row, 0]]
            above = [1 + int((expected[row] > near + error).sum()) for error in (1e-4, -1e-4)]
            assert above[0] <= ranks[row] <= above[1]
            assert not greedy or ranks[row] == 1
        return output

    runner.sample = check
    for request_kinds in (WITH_LOGPROBS[:5], WITH_LOGPROBS[5:]):
        for kind in [*request_kinds, "plain", "default"]:
            settings = request(kind)
            if greedy:
                settings.temperature, settings.top_k, settings.top_p = 0, 0, 1.0
            play.add(kind, settings, PROMPT)
        for _ in range(2):
            play.step(None, grammars(request_kinds))
        for kind in list(play.slots):
            play.remove(kind)
    assert set(checked) == set(WITH_LOGPROBS) and runner._fsbench.sampling.counts.unserved == {}


def test_rows_have_the_settings_and_the_hidden_state_of_their_request(load):
    runner = load()
    sampling, play = runner._fsbench.sampling, Play(runner)
    sampling.draw = recording = Recording(sampling.draw)
    request_kinds = ["plain", "greedy", "default", "top-p", "min-p", "repetition"]
    for seed, kind in enumerate(request_kinds):
        play.add(kind, request(kind, seed), [11, 12, seed])
    for _ in range(3):
        inputs = {
            kind: [11, 12, seed, *play.output(kind)] for seed, kind in enumerate(request_kinds)
        }
        recording.rows.clear()
        play.step()
        drawn = 0
        for rows in recording.rows:
            for row, seed in enumerate(rows.seed.tolist()):
                p, tokens = play.params[request_kinds[seed]], inputs[request_kinds[seed]]
                top_k, top_p, min_p = (each[row] for each in rows.filters)
                assert torch.equal(rows.hidden[row], hidden_state(tokens).bfloat16())
                assert rows.offset[row] == len(tokens) - 1
                settings = torch.tensor([p.temperature, p.top_p, p.min_p], dtype=torch.float32)
                assert torch.equal(torch.stack([rows.temperature[row], top_p, min_p]), settings)
                assert top_k == (p.top_k or V)
                drawn += 1
        assert drawn == len(request_kinds)


def test_forbidden_tokens_are_never_drawn(load):
    runner = load()
    runner.model.lm_head.weight.mul_(0.05)  # nearly flat
    play = Play(runner)
    play.add("allowed", request("allowed"), PROMPT)
    play.add("bad", params(bad_words_token_ids=[[9], [90, 500]], allowed_token_ids=[9, 90, 500]),
             PROMPT)  # fmt: skip
    play.add("short", params(min_tokens=8, all_stop_token_ids=(9,), allowed_token_ids=[9, 90]),
             PROMPT)  # fmt: skip
    play.add("grammar", params(logit_bias={31: 3.0, 8: 100.0}), PROMPT)
    for _ in range(12):
        play.step(None, grammars(play.slots))
    assert set(play.output("allowed")) == {9, 90, 500}
    bad = play.output("bad")
    assert 9 not in bad and [90, 500] not in [bad[i : i + 2] for i in range(12)]
    assert play.output("short")[:8] == [90] * 8 and 9 in play.output("short")
    assert set(play.output("grammar")) <= set(GRAMMAR)
    assert runner._fsbench.sampling.counts.unserved == {}


def test_penalties_are_those_of_the_engine(load):
    """A large one forbids tokens that were drawn, a negative one repeats them; each counts once."""
    runner = load()
    runner.model.lm_head.weight.mul_(0.001)
    play, few = Play(runner), {"allowed_token_ids": [9, 90, 500]}
    play.add("once", params(presence_penalty=1e4, **few), PROMPT)
    play.add("again", params(frequency_penalty=-1e4, **few), PROMPT)
    play.add("prompt", params(repetition_penalty=1e6, logit_bias={9: 50.0, 90: 50.0, 500: 50.0},
                              temperature=0.1), [9, 90])  # fmt: skip
    biased = {"presence_penalty": 3.0, "temperature": 0.01, "logit_bias": {9: 50.0, 90: 46.0}}
    play.add("both", params(repetition_penalty=1.0001, **biased), PROMPT)
    play.add("one", params(**biased), PROMPT)
    for _ in range(3):
        play.step()
    assert sorted(play.output("once")) == [9, 90, 500]
    assert len(set(play.output("again"))) == 1
    assert play.output("prompt")[0] == 500
    assert play.output("both") == play.output("one") == [9, 9, 9]


def test_incomplete_prompts_get_no_token(load):
    runner = load()
    play = Play(runner)
    play.add("long", request("plain"), list(range(30)))
    play.add("short", request("default"), PROMPT)
    for _ in range(2):
        play.step(chunk=8)
    assert play.output("long") == [] and len(play.output("short")) == 2
    assert runner._fsbench.sampling.counts.as_dict() == {"served": 2, "left": {}}


def test_a_row_without_a_finite_logit_gets_token_0(load):
    runner = load()
    play = Play(runner)
    play.add("broken", request("plain"), PROMPT)
    play.add("sound", request("plain"), PROMPT)
    hidden, batch = play.batch(["broken", "sound"])
    hidden[batch.logits_indices[0], 3] = torch.nan
    output, *_ = runner.sample(hidden, batch, None)
    assert output.sampled_token_ids[0, 0] == 0 and output.sampled_token_ids[1, 0] > 0


def test_outputs_are_new_tensors(load):
    """vLLM copies them on another stream while the next step runs."""
    play = Play(load())
    play.add("one", params(logprobs=0), PROMPT)
    first, second = (
        [step.sampled_token_ids, step.num_sampled, *step.logprobs_tensors[:3]]
        for step in (play.step(), play.step())
    )
    for old, new in zip(first, second, strict=True):
        assert old.data_ptr() != new.data_ptr()


def test_settings_are_gathered_only_when_the_batch_changes(load, monkeypatch):
    play, gathered, settings = Play(load()), [], adapter.settings
    play.add("one", request("default"), PROMPT)
    play.add("two", request("plain"), PROMPT)

    def counted(runner, slots):
        gathered.append(slots.tolist())
        return settings(runner, slots)

    monkeypatch.setattr(adapter, "settings", counted)
    for _ in range(3):
        play.step()
    assert len(gathered) == 1
    play.remove("one")
    play.step()
    play.add("three", request("greedy"), PROMPT)
    play.step()
    assert len(gathered) == 3


@pytest.fixture
def default_dtype():
    """Set torch's default dtype, which engines change while they load a model."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("flash_sample", torch.float64), *((n, torch.bfloat16) for n in ("flash_sample", "screened"))],
)
def test_torchs_default_dtype_changes_nothing(load, default_dtype, name, dtype):
    """Loaded, warmed up and decoded under it, requests of every kind."""

    def outputs():
        runner = load(name)
        runner._dummy_sampler_run(torch.zeros(1, D, dtype=torch.bfloat16))
        return decode(runner, list(KINDS), 2)

    expected, expected_logprobs = outputs()
    default_dtype(dtype)
    tokens, logprobs = outputs()
    assert tokens == expected and logprobs.keys() == expected_logprobs.keys()
    for kind in logprobs.keys() - set(BY_VLLM):
        for step, expected_step in zip(logprobs[kind], expected_logprobs[kind], strict=True):
            for value, other in zip(step, expected_step, strict=True):
                assert value.dtype == other.dtype and torch.equal(value, other), kind
