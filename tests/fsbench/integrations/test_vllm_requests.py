"""What requests get from the plug-in: of every kind, beside every kind, in a fake of vLLM."""

from __future__ import annotations

import pytest
import torch
from fake_vllm import Model
from fake_vllm_states import NO_LOGPROBS, V, params
from vllm_play import GRAMMAR, KINDS, PROMPT, Play, request

from fsbench.e2e.models import parameters
from fsbench.integrations.draw import history
from fsbench.kernels import Penalties, flash_sample, truncated_sample

TELLING = [kind for kind in KINDS if kind.endswith("logprobs")]
BY_VLLM = ("many logprobs", "given logprobs")
"""Kinds of which vLLM tells the log-probabilities of other tokens than the drawn one."""


def decoded(play: Play, kind: str, steps: int = 5, beside: list[str] = (), preempt: int = -1):
    """Tokens of a request of a kind, with neighbors that come and go."""
    play.add("mine", request(kind), PROMPT)
    for number, other in enumerate(beside):
        play.add(f"{other} {number}", request(other, number), [20 + number, 21])
    for step in range(steps):
        if step == preempt:
            play.preempt("mine")
        names = list(play.slots)
        turn = step % len(names)
        names = names[turn:] + names[:turn]
        constrained = [
            name for name in names if (kind if name == "mine" else name).startswith("grammar")
        ]
        play.step(names, dict.fromkeys(constrained, GRAMMAR))
    tokens = play.output("mine")
    for name in list(play.slots):
        play.remove(name)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_means_a_seed(load, kind):
    """Alone, and in another engine beside seven other kinds, in any row, after a preemption."""
    alone = decoded(Play(load()), kind)
    assert len(set(alone)) > 1 or kind == "allowed"
    others = list(KINDS) * 2
    beside = others[others.index(kind) + 1 :][:7]
    assert decoded(Play(load()), kind, beside=beside, preempt=3) == alone


@pytest.mark.parametrize("kind", ["plain", "greedy", "default", "frequency", "top logprobs"])
def test_a_seed_means_a_seed_across_the_border_of_the_screen(load, screens, kind):
    """Alone, beside one that joins it on the screen, and beside more than are screened."""
    play = Play(load("screened"))
    alone = decoded(play, kind)
    assert decoded(play, kind, beside=["plain"]) == alone
    assert decoded(play, kind, beside=["plain"] * 5) == alone
    assert decoded(play, kind, beside=["plain", "default"]) == alone
    assert decoded(Play(load()), kind) != alone or kind in ("greedy", "default")
    assert set(screens) == ({1, 2} if kind in ("plain", "greedy", "frequency") else set()), screens


@pytest.mark.full
def test_a_seed_means_a_seed_in_the_kernels(load):
    """In fp16 the interpreter runs them; in bf16 it is the reference that draws."""
    play = Play(load(model=Model(dtype=torch.float16)), torch.float16)
    kinds = ["plain", "default", "frequency", "repetition", "grammar", "default logprobs", "greedy"]
    alone = {kind: decoded(play, kind, 2) for kind in kinds}
    for kind, tokens in alone.items():
        beside = [other for other in kinds if other != kind]
        assert decoded(play, kind, 2, beside=[*beside[:5], "top logprobs"], preempt=1) == tokens


def test_every_kind_is_counted_and_served(load):
    runner = load()
    play = Play(runner)
    for kind in KINDS:
        decoded(play, kind)
    counts = runner._fsbench.sampling.counts
    assert counts.as_dict() == {"served": 5 * len(KINDS), "left": {}}
    # vLLM is asked for what else is told of many tokens, or of given ones.
    sampled = [call for call in runner.calls if call[0] == "sample"]
    assert sampled == [("sample", ["mine"])] * 10


@pytest.mark.parametrize("name", ["flash_sample", "screened"])
def test_a_realistic_mix_is_served(load, name):
    """Kinds of `fsbench e2e --requests mixed`, and each of ours, among each other: 99 % or more."""
    asked = [params(**parameters("mixed", row, seed=3)) for row in range(8)]
    asked += [request(kind) for kind in KINDS if kind not in BY_VLLM]
    runner, tokens = load(name), 0
    play, waiting = Play(runner), asked * 3
    while waiting or play.slots:
        while waiting and len(play.slots) < 8:
            play.add(str(len(waiting)), waiting.pop(), PROMPT)
        play.step(None, {next(iter(play.slots)): GRAMMAR})
        for each in [each for each in play.slots if len(play.output(each)) > int(each) % 4]:
            tokens += len(play.remove(each)[1])
    counts = runner._fsbench.sampling.counts
    assert counts.served + sum(counts.left.values()) == tokens > 3 * len(asked)
    assert counts.served >= 0.99 * tokens
    assert not [call for call in runner.calls if call[0] == "sample"]


def test_of_a_mixed_batch_vllm_draws_what_is_left_and_nothing_else(load):
    runner = load()
    play = Play(runner)
    runner.sampler.logprobs_mode = "raw_logits"
    for kind in ("plain", "top logprobs", "default", "tempered logprobs", "greedy"):
        play.add(kind, request(kind), PROMPT)
    output = play.step()
    assert [call for call in runner.calls if call[0] == "sample"] == [
        ("sample", ["top logprobs", "tempered logprobs"])
    ]
    counts = runner._fsbench.sampling.counts
    assert counts.served == 3 and counts.left == {"logits": 2}
    ids, values, ranks = output.logprobs_tensors[:3]
    assert ids.shape == values.shape == (5, 4) and ids.dtype == torch.int64
    assert torch.equal(ids[:, 0], output.sampled_token_ids[:, 0])
    assert values[1].isfinite().all() and values[3].isfinite().all() and ranks[[1, 3]].min() >= 1
    assert (values[[0, 2, 4], 1:] == -torch.inf).all()


@pytest.mark.parametrize("kind", TELLING)
def test_a_request_draws_the_same_tokens_with_log_probabilities_and_without(load, kind):
    runner = load()
    silent = request(kind)
    silent.logprobs = silent.logprob_token_ids = None
    play = Play(runner)
    play.add("told", request(kind), PROMPT)
    play.add("silent", silent, PROMPT)
    allowed = dict.fromkeys(play.slots, GRAMMAR) if kind.startswith("grammar") else None
    for _ in range(4):
        play.step(None, allowed)
    assert play.output("told") == play.output("silent")


def scores(runner, hidden, batch, given) -> torch.Tensor:
    """What vLLM would tell of every token, of logits in fp32: [B, V]."""
    logits = hidden[batch.logits_indices].float() @ runner.model.lm_head.weight[:V].float().T
    if given is not None:
        runner.structured_outputs_worker.apply_grammar_bitmask(
            *(logits, batch, given.structured_output_request_ids, given.grammar_bitmask)
        )
    state, slots = runner.sampler.logprob_token_ids_state, batch.idx_mapping_np.tolist()
    asked = [state.token_ids[slot] for slot in slots]
    for slot in slots:
        state.token_ids[slot] = list(range(V))
    found = runner.sampler(logits, batch).logprobs_tensors.logprobs[:, 1:]
    for slot, tokens in zip(slots, asked, strict=True):
        state.token_ids[slot] = tokens
    return found


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("greedy", [False, True])
def test_log_probabilities_and_ranks_are_vllms(load, mode, greedy):
    """Of all kinds beside each other; vLLM rounds logits to bf16, and tells some itself."""
    runner = load()
    runner.sampler.logprobs_mode = mode
    play, sample, told = Play(runner), runner.sample, []

    def checked(hidden, batch, given):
        output = sample(hidden, batch, given)
        expected = scores(runner, hidden, batch, given)
        ids, values, ranks = output[0].logprobs_tensors[:3]
        assert torch.equal(ids[:, 0], output[0].sampled_token_ids[:, 0])
        for row, name in enumerate(batch.req_ids):
            p = play.params[name]
            given_ids = p.logprob_token_ids or []
            n = len(given_ids) or (NO_LOGPROBS if p.logprobs is None else p.logprobs)
            if n == NO_LOGPROBS:
                continue
            told.append(name)
            mine, others = values[row, : 1 + n], ids[row, 1 : 1 + n].tolist()
            error = 0.08 if name in BY_VLLM else 2e-3
            close = {"atol": error, "rtol": 0.0}
            torch.testing.assert_close(mine[:1], expected[row, ids[row, :1]], atol=2e-3, rtol=0)
            torch.testing.assert_close(mine[1:], expected[row, others], **close)
            assert len(set(others)) == n and (not given_ids or others == given_ids)
            if not given_ids:
                torch.testing.assert_close(mine[1:], expected[row].topk(n).values, **close)
            near = expected[row, ids[row, 0]]
            above = [1 + int((expected[row] > near + way).sum()) for way in (1e-4, -1e-4)]
            assert above[0] <= ranks[row] <= above[1]
            assert not greedy or ranks[row] == 1
        return output

    runner.sample = checked
    for kinds in (TELLING[:5], TELLING[5:]):
        for kind in [*kinds, "plain", "default"]:
            asked = request(kind)
            if greedy:
                asked.temperature, asked.top_k, asked.top_p = 0, 0, 1.0
            play.add(kind, asked, PROMPT)
        for _ in range(3):
            play.step(None, {"grammar logprobs": GRAMMAR} if "grammar logprobs" in kinds else None)
        for kind in list(play.slots):
            play.remove(kind)
    assert set(told) == set(TELLING) and runner._fsbench.sampling.counts.left == {}


def test_tokens_are_those_of_the_kernels_called_directly(load):
    """Each kind with its own settings: nothing of a neighbor's reaches it."""
    runner = load()
    play = Play(runner)
    weight = runner.model.lm_head.weight
    for kind in ("plain", "greedy", "default", "top-p", "min-p", "repetition"):
        play.add(kind, request(kind, len(kind)), [11, 12, len(kind)])
    for _ in range(4):
        before = {name: play.output(name) for name in play.slots}
        hidden, batch = play.batch(list(play.slots))
        play._fed = {name: fed - 1 for name, fed in play._fed.items()}
        if not before["plain"]:
            play._fed = dict.fromkeys(play.slots, 0)
        output = play.step()
        for row, kind in enumerate(batch.req_ids):
            p, at = play.params[kind], batch.logits_indices[row]
            seen = [11, 12, len(kind)]
            same = {
                "temperature": torch.tensor([float(p.temperature)]),
                "seed": torch.tensor([p.seed]),
                "offset": torch.tensor([len(seen) + len(before[kind]) - 1]),
                "vocab_size": V,
            }
            if kind in ("plain", "greedy"):
                token = flash_sample(hidden[at : at + 1], weight, **same).tokens
            else:
                bits = torch.zeros(1, -(-V // 32), dtype=torch.int32)
                for each in seen:
                    bits[0, each // 32] |= 1 << (each % 32)
                counts = torch.bincount(torch.tensor(before[kind], dtype=torch.int64), minlength=V)
                penalties = Penalties(history(bits, counts[None].int(), 64), p.repetition_penalty)
                token = truncated_sample(
                    *(hidden[at : at + 1], weight),
                    top_k=p.top_k,
                    top_p=p.top_p,
                    min_p=p.min_p,
                    penalties=penalties if kind == "repetition" else None,
                    **same,
                ).tokens
            assert output.sampled_token_ids[row, 0] == token[0], kind


def test_what_is_forbidden_is_never_drawn(load):
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
        play.step(None, {"grammar": GRAMMAR})
    assert set(play.output("allowed")) == {9, 90, 500}
    bad = play.output("bad")
    assert 9 not in bad and [90, 500] not in [bad[i : i + 2] for i in range(12)]
    assert play.output("short")[:8] == [90] * 8 and 9 in play.output("short")
    assert set(play.output("grammar")) <= set(GRAMMAR)
    assert runner._fsbench.sampling.counts.left == {}


def test_penalties_are_those_of_the_engine(load):
    """A large one forbids what is there; a negative one draws it again."""
    runner = load()
    runner.model.lm_head.weight.mul_(0.05)
    play = Play(runner)
    few = {"allowed_token_ids": [9, 90, 500]}
    play.add("once", params(presence_penalty=1e4, **few), PROMPT)
    play.add("again", params(frequency_penalty=-1e4, **few), PROMPT)
    play.add("prompt", params(repetition_penalty=1e6, logit_bias={9: 50.0, 90: 50.0, 500: 50.0},
                              temperature=0.1), [9, 90])  # fmt: skip
    for _ in range(3):
        play.step()
    assert sorted(play.output("once")) == [9, 90, 500]
    assert len(set(play.output("again"))) == 1
    assert play.output("prompt")[0] == 500


def test_penalties_count_once_beside_a_bias(load):
    runner = load()
    runner.model.lm_head.weight.mul_(0.001)
    play = Play(runner)
    play.add("both", params(repetition_penalty=1.0001, presence_penalty=3.0, temperature=0.01,
                            logit_bias={9: 50.0, 90: 46.0}), PROMPT)  # fmt: skip
    play.add("one", params(presence_penalty=3.0, temperature=0.01, logit_bias={9: 50.0, 90: 46.0}),
             PROMPT)  # fmt: skip
    for _ in range(3):
        play.step()
    assert play.output("both") == play.output("one") == [9, 9, 9]


def test_unseeded_requests_do_not_repeat(load):
    runner = load()
    runner.model.lm_head.weight.mul_(0.05)
    play = Play(runner)
    seen = set()
    for _ in range(20):
        seen.add(tuple(decoded_unseeded(play)))
    assert len(seen) == 20


def decoded_unseeded(play: Play) -> list[int]:
    play.add("mine", params(), PROMPT)
    play.step()
    play.step()
    return play.remove("mine")[1]


def test_prompts_in_parts_get_no_token(load):
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
    """vLLM copies them on another stream while the next step goes on."""
    runner = load()
    play = Play(runner)
    play.add("one", params(logprobs=0), PROMPT)
    first, second = play.step(), play.step()
    for name in ("sampled_token_ids", "num_sampled"):
        assert getattr(first, name).data_ptr() != getattr(second, name).data_ptr()
    for mine, other in zip(first.logprobs_tensors[:3], second.logprobs_tensors[:3], strict=True):
        assert mine.data_ptr() != other.data_ptr()


def test_settings_are_gathered_when_the_batch_changes_and_not_before(load, monkeypatch):
    runner = load()
    play = Play(runner)
    play.add("one", request("default"), PROMPT)
    play.add("two", request("plain"), PROMPT)
    adapter, asked = runner._fsbench.sampling.adapter, []
    settings = type(adapter).settings

    def counted(self, runner, slots):
        asked.append(slots.tolist())
        return settings(self, runner, slots)

    monkeypatch.setattr(type(adapter), "settings", counted)
    for _ in range(3):
        play.step()
    assert len(asked) == 1
    play.remove("one")
    play.step()
    play.add("three", request("greedy"), PROMPT)
    play.step()
    assert len(asked) == 3
