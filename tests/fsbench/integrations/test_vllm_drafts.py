"""Drafts in vLLM: requests get the tokens of decoding without drafts, whoever verifies them."""

from __future__ import annotations

import types

import pytest
import torch
from fake_vllm import DraftModelSpeculator, Model
from fake_vllm_states import D, V, params
from vllm_play import GRAMMAR, KINDS, PROMPT, Play, Recording, request

from fsbench.integrations.draw import SERVING
from fsbench.integrations.vllm_0_26 import unsupported_reason
from fsbench.kernels import flash_sample

STEPS = 3
UNSUPPORTED = {
    "repetition": "repetition penalty",
    "penalized logprobs": "repetition penalty",
    "many logprobs": "many logprobs",
    "given logprobs": "many logprobs",
}
"""Kinds that vLLM samples in an engine with drafts -> the reason."""
CONSTRAINED = ("grammar", "penalized")


@pytest.fixture
def speculating(monkeypatch, load):
    """Return a function like load whose runner has drafts, which the plug-in verifies."""
    monkeypatch.setenv("FSBENCH_VLLM_DRAFTS", "1")

    def loaded(name="flash_sample", speculator=None, **parts):
        speculator = speculator or DraftModelSpeculator(parts.setdefault("model", Model()))
        return load(name, speculative_config=object(), speculator=speculator, **parts)

    return loaded


def play_of(runner, request_kinds):
    play = Play(runner)
    for number, kind in enumerate(request_kinds):
        play.add(kind, request(kind, number), [*PROMPT, number])
    return play


def decode(runner, request_kinds, propose=lambda name, output: [], length=8):
    """Decode requests of these kinds together; return their tokens and log-probabilities.

    Args:
        propose: (kind, tokens so far) -> drafts of the next step.
    """
    play, tokens = play_of(runner, request_kinds), {}
    while play.slots:
        names = list(play.slots)
        drafts = {name: propose(name, play.output(name)) for name in names}
        allowed = {}
        for name in names:
            if name.startswith(CONSTRAINED):  # a grammar whose tokens differ at each position
                first = len(play.output(name))
                positions = range(first, first + len(drafts[name]) + 1)
                allowed[name] = [[(t + position) % V for t in GRAMMAR] for position in positions]
        play.step(names, allowed, None, drafts)
        for name in names:
            if len(play.output(name)) >= length:
                tokens[name] = play.remove(name)[1][:length]
    return tokens, {name: values[:length] for name, values in play.logprobs.items()}


def propose_from(plain):
    """Return drafts by request and position: all right, the second wrong, none, few, random."""

    def propose(name, output):
        first = len(output)
        right = plain[name][first : first + STEPS]
        wrong = [*right[:1], *((token + 1) % V for token in right[1:2]), *right[2:]]
        choices = [right, wrong, [], right[:1], [first, first + 1, first + 2]]
        return choices[(list(plain).index(name) + first) % 5]

    return propose


@pytest.mark.parametrize("first", range(0, len(KINDS), 8))
def test_drafts_change_no_token_and_no_log_probability(speculating, load, first):
    request_kinds = list(KINDS)[first : first + 8]
    plain, logprobs = decode(
        speculating() if UNSUPPORTED.keys() & request_kinds else load(), request_kinds
    )
    runner = speculating()
    drafted, drafted_logprobs = decode(runner, request_kinds, propose_from(plain))
    assert drafted == plain
    assert logprobs.keys() == drafted_logprobs.keys()
    for kind, steps in logprobs.items():
        for step, other in zip(steps, drafted_logprobs[kind], strict=True):
            width = min(len(step[0]), len(other[0]))
            for a, b in zip(step, other, strict=True):
                torch.testing.assert_close(*(x[:width] if x.ndim else x for x in (a, b)))
    counts = runner._fsbench.sampling.counts
    assert set(counts.unserved) == {
        UNSUPPORTED[kind] for kind in UNSUPPORTED if kind in request_kinds
    }
    assert counts.served > 0


def test_right_drafts_are_accepted_and_wrong_ones_are_not(speculating):
    request_kinds = ["plain", "repetition", "greedy", "frequency", "default"]
    plain, _ = decode(speculating(), request_kinds, length=9)
    play = play_of(speculating(), request_kinds)
    play.step()
    output = play.step(drafts={kind: plain[kind][1:4] for kind in request_kinds})
    assert output.num_sampled.tolist() == [4] * 5 and output.num_rejected.tolist() == [0] * 5
    assert output.sampled_token_ids.dtype == torch.int64
    assert output.num_sampled.dtype == torch.int32
    assert output.sampled_token_ids.tolist() == [plain[kind][1:5] for kind in request_kinds]
    output = play.step(
        drafts={kind: [(plain[kind][5] + 1) % V, *plain[kind][6:8]] for kind in request_kinds[:2]}
    )
    assert output.num_sampled.tolist() == [1] * 5
    assert output.num_rejected.tolist() == [3, 3, 0, 0, 0]
    assert [play.output(kind) for kind in request_kinds] == [
        plain[kind][:6] for kind in request_kinds
    ]


def test_a_row_of_the_next_request_is_no_draft(speculating):
    plain, _ = decode(speculating(), ["plain"])
    play = play_of(speculating(), ["plain"])
    play.add("next", params(seed=2), plain["plain"][:1])
    output = play.step(drafts={"next": [1]})
    assert output.num_sampled[0] == 1 and play.output("plain") == plain["plain"][:1]


def test_incomplete_prompts_get_no_token_in_a_batch_with_drafts(speculating):
    plain, _ = decode(speculating(), ["plain"])
    play = play_of(speculating(), ["plain"])
    play.step()
    play.add("long", params(seed=5), [9] * 7)
    output = play.step(["long", "plain"], None, 3, {"plain": plain["plain"][1:3]})
    assert output.num_sampled.tolist() == [0, 3] and output.num_rejected.tolist() == [0, 0]
    assert play.output("plain") == plain["plain"][:4] and play.output("long") == []


def test_a_row_without_a_finite_logit_is_token_0_for_a_draft_too(speculating):
    play = Play(speculating())
    play.add("none", params(allowed_token_ids=[3], logit_bias={3: -torch.inf}, seed=1), PROMPT)
    play.step()
    output = play.step(drafts={"none": [0, 1, 0]})
    assert output.sampled_token_ids[0, : output.num_sampled[0]].tolist() == [0, 0]


@pytest.mark.parametrize("name", SERVING)
def test_drafts_are_the_argmax_of_the_drafters_head(speculating, screens, name):
    """The drafter shares the target's head, or has one of a reduced vocabulary."""
    hidden = torch.randn(3, D).bfloat16()
    runner = speculating(name)
    expected = DraftModelSpeculator._greedy_sample_draft(runner.speculator, hidden)
    assert runner.speculator._greedy_sample_draft(hidden).equal(expected)
    assert len(runner._fsbench._draws) == 1 and bool(screens) == (name == "screened")

    small = Model()
    small.lm_head.weight = torch.randn(V // 2, D).bfloat16()
    small.logits_processor.org_vocab_size = V // 2
    small.lm_head.shard_indices.org_vocab_end_index = V // 2
    d2t = torch.arange(V // 2)  # row i is token 2i
    memory = runner.model_memory_usage
    runner = speculating(name, speculator=DraftModelSpeculator(small, d2t))
    expected = DraftModelSpeculator._greedy_sample_draft(runner.speculator, hidden)
    drafts = runner.speculator._greedy_sample_draft(hidden)
    assert drafts.equal(expected) and (drafts % 2 == 0).all() and drafts.dtype == torch.int64
    _, drafter = runner._fsbench._draws
    assert runner.model_memory_usage - memory == drafter.extra_bytes
    small.lm_head.weight.neg_()
    small.load_weights([])
    play = Play(runner)
    play.add("one", params(seed=1), PROMPT)
    play.step()
    seed = torch.zeros(1, dtype=torch.int64)
    rows = flash_sample(hidden, small.lm_head.weight, temperature=0.0, seed=seed).tokens
    assert runner.speculator._greedy_sample_draft(hidden).equal(2 * rows)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: setattr(s.model.logits_processor, "scale", 0.5), "model: scaled logits"),
        (lambda s: setattr(s, "dtype", torch.float32), "model: draft head in torch.bfloat16"),
        (lambda s: delattr(s.model, "lm_head"), "model: no lm_head.weight and logits_processor"),
    ],
)
def test_unsupported_draft_heads_are_left_to_vllm_and_drafts_are_verified(
    speculating, caplog, change, reason
):
    speculator = DraftModelSpeculator(Model())
    change(speculator)
    with caplog.at_level("INFO", "vllm.fsbench"):
        runner = speculating(speculator=speculator)
    assert f"vLLM draws the drafts ({reason})" in caplog.text
    assert "_greedy_sample_draft" not in vars(speculator)
    assert runner._fsbench.sampling.draw is not None


@pytest.mark.parametrize(
    ("part", "attribute", "value", "reason"),
    [
        ("rejection_sampler", "synthetic_conditional_rates", 1, "engine: another rule for drafts"),
        ("rejection_sampler", "use_block_verification", True, "engine: another rule for drafts"),
        ("speculator", "draft_logits", torch.zeros(1), "engine: sampled drafts"),
        ("", "rejection_sampler", types.SimpleNamespace(), "engine: SimpleNamespace"),
    ],
)
def test_unsupported_speculation_is_left_to_vllm(speculating, part, attribute, value, reason):
    runner = speculating()
    setattr(getattr(runner, part) if part else runner, attribute, value)
    assert unsupported_reason(runner, drafts=True) == reason


def test_drafts_are_verified_only_if_switched_on_and_by_a_serving_sampler(monkeypatch, speculating):
    assert speculating("multinomial")._fsbench.sampling.disabled_reason == "engine: drafts"
    monkeypatch.setenv("FSBENCH_VLLM_DRAFTS", "")
    for name in SERVING:
        assert speculating(name)._fsbench.sampling.disabled_reason == "engine: drafts"


def test_rows_of_drafts_are_warmed_up_too(speculating):
    runner = speculating(max_num_tokens=9)
    sampling = runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw, real=False)
    for requests, sizes in ((2, {1, 2, 3, 5, 8}), (3, {1, 2, 3, 5, 9})):
        recording.rows.clear()
        runner._dummy_sampler_run(torch.randn(requests, D).bfloat16())
        assert {len(rows.hidden) for rows in recording.rows} == sizes
