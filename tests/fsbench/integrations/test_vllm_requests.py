"""What requests get from the plug-in: of every kind, beside every kind, in a fake of vLLM."""

from __future__ import annotations

import pytest
import torch
from fake_vllm import Model
from fake_vllm_states import V, params
from vllm_play import GRAMMAR, KINDS, PROMPT, Play, request

from fsbench.integrations.draw import history
from fsbench.integrations.routing import REASONS
from fsbench.kernels import Penalties, flash_sample, truncated_sample

LEFT = {"top logprobs", "tempered logprobs"}


def decoded(play: Play, kind: str, steps: int = 5, beside: list[str] = (), preempt: int = -1):
    """Tokens of a request of a kind, with neighbours that come and go."""
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
    """Alone, beside neighbours of every kind, in any row, and after a preemption."""
    runner = load()
    play = Play(runner)
    alone = decoded(play, kind)
    assert len(set(alone)) > 1 or kind == "allowed"
    assert decoded(play, kind, preempt=3) == alone
    others = list(KINDS)
    for first in range(0, len(others), 7):
        assert decoded(play, kind, beside=others[first : first + 7]) == alone
    assert decoded(play, kind, beside=["default", "top logprobs", "plain"], preempt=2) == alone
    restarted = load()  # an engine that was killed
    assert decoded(Play(restarted), kind, beside=["plain"]) == alone


@pytest.mark.full
def test_a_seed_means_a_seed_in_the_kernels(load):
    """In fp16 the interpreter runs them; in bf16 it is the reference that draws."""
    play = Play(load(model=Model(dtype=torch.float16)), torch.float16)
    kinds = ["plain", "default", "frequency", "repetition", "grammar", "logprobs", "greedy"]
    alone = {kind: decoded(play, kind, 2) for kind in kinds}
    for kind, tokens in alone.items():
        beside = [other for other in kinds if other != kind]
        assert decoded(play, kind, 2, beside=[*beside[:5], "top logprobs"], preempt=1) == tokens


def test_every_kind_is_counted_and_a_realistic_mix_is_served(load):
    runner = load()
    play = Play(runner)
    for kind in KINDS:
        decoded(play, kind)
    counts = runner._fsbench.sampling.counts
    assert counts.served == 5 * (len(KINDS) - len(LEFT))
    assert counts.left == {"top logprobs": 5, "logprobs of another distribution": 5}
    assert set(counts.left) <= {*REASONS.values()}
    sampled = [call for call in runner.calls if call[0] == "sample"]
    assert sampled == [("sample", ["mine"])] * 10


def test_of_a_mixed_batch_vllm_draws_what_is_left_and_nothing_else(load):
    runner = load()
    play = Play(runner)
    for kind in ("plain", "top logprobs", "default", "tempered logprobs", "logprobs"):
        play.add(kind, request(kind), PROMPT)
    output = play.step()
    assert [call for call in runner.calls if call[0] == "sample"] == [
        ("sample", ["top logprobs", "tempered logprobs"])
    ]
    counts = runner._fsbench.sampling.counts
    assert counts.served == 3 and sum(counts.left.values()) == 2
    ids, values, ranks = output.logprobs_tensors[:3]
    assert ids.shape == values.shape == (5, 4) and ids.dtype == torch.int64
    assert torch.equal(ids[:, 0], output.sampled_token_ids[:, 0])
    assert values[1].isfinite().all() and values[3].isfinite().all() and ranks[[1, 3]].min() >= 1
    assert (values[[0, 2, 4], 1:] == -torch.inf).all()


def test_log_probabilities_are_those_of_the_raw_logits(load):
    """At T = 1 and 0, also under a grammar; that of a greedy row has rank 1."""
    runner = load()
    play = Play(runner)
    play.add("sampled", params(seed=1, logprobs=0), PROMPT)
    play.add("greedy", params(temperature=0, logprobs=0), PROMPT)
    play.add("constrained", params(seed=2, logprobs=0), PROMPT)
    hidden, batch = play.batch(list(play.slots))
    play._fed = dict.fromkeys(play.slots, 0)
    output = play.step(None, {"constrained": GRAMMAR})
    logits = hidden[batch.logits_indices].float() @ runner.model.lm_head.weight[:V].float().T
    logits[2, [token for token in range(V) if token not in GRAMMAR]] = -torch.inf
    expected = logits.log_softmax(1).gather(1, output.sampled_token_ids)
    tensors = output.logprobs_tensors
    torch.testing.assert_close(tensors.logprobs, expected, atol=1e-3, rtol=0)
    assert tensors.selected_token_ranks.tolist() == [0, 1, 0]
    assert output.sampled_token_ids[1, 0] == logits[1].argmax()
    assert output.sampled_token_ids[2, 0] in GRAMMAR
    assert runner._fsbench.sampling.counts.left == {}


def test_log_probabilities_of_what_is_drawn_from_are_served_at_any_temperature(load):
    runner = load()
    runner.sampler.logprobs_mode = "processed_logprobs"
    play = Play(runner)
    play.add("tempered", params(temperature=0.5, seed=1, logprobs=0, logit_bias={5: 3.0}), PROMPT)
    hidden, _ = play.batch(["tempered"])
    play._fed["tempered"] = 0
    output = play.step()
    logits = hidden[3:4].float() @ runner.model.lm_head.weight[:V].float().T
    logits[0, 5] += 3
    expected = (logits / 0.5).log_softmax(1).gather(1, output.sampled_token_ids)
    torch.testing.assert_close(output.logprobs_tensors.logprobs, expected, atol=1e-3, rtol=0)


def test_tokens_are_those_of_the_kernels_called_directly(load):
    """Each kind with its own settings: nothing of a neighbour's reaches it."""
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
