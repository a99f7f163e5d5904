"""Drafts in vLLM: requests get the tokens of decoding without drafts, whoever draws them."""

from __future__ import annotations

import types

import pytest
import torch
from fake_vllm import DraftModelSpeculator, Model
from fake_vllm_states import D, V, params
from vllm_play import GRAMMAR, KINDS, PROMPT, Play, Recording, request

from fsbench.integrations.draw import OWN
from fsbench.kernels import flash_sample

STEPS = 3
BESIDE = {
    "repetition": "repetition penalty",
    "penalized logprobs": "repetition penalty",
    "many logprobs": "many logprobs",
    "given logprobs": "many logprobs",
}
"""Kinds that are left to vLLM beside drafts, and why."""
CONSTRAINED = ("grammar", "penalized")


@pytest.fixture
def speculating(monkeypatch, load):
    """A runner of the fake with drafts, which the plug-in verifies."""
    monkeypatch.setenv("FSBENCH_VLLM_DRAFTS", "1")

    def made(name="flash_sample", speculator=None, **parts):
        speculator = speculator or DraftModelSpeculator(parts.setdefault("model", Model()))
        return load(name, speculative_config=object(), speculator=speculator, **parts)

    return made


def decoded(runner, kinds, drafts=None, length=8):
    """Tokens of requests of these kinds, side by side, and what is told of them.

    drafts: (kind, tokens so far) -> drafts of the next step.
    """
    play = Play(runner)
    for number, kind in enumerate(kinds):
        play.add(kind, request(kind, number), [*PROMPT, number])
    done = {}
    while play.slots:
        names = list(play.slots)
        given = {name: drafts(name, play.output(name)) if drafts else [] for name in names}
        allowed = {
            name: [
                [(token + at) % V for token in GRAMMAR]
                for at in range(len(play.output(name)), len(play.output(name) + given[name]) + 1)
            ]
            for name in names
            if name.startswith(CONSTRAINED)
        }
        play.step(names, allowed, None, given)
        for name in names:
            if len(play.output(name)) >= length:
                done[name] = play.remove(name)[1][:length]
    return done, {name: told[:length] for name, told in play.logprobs.items()}


def foreseen(plain):
    """Drafts by request: all right, the second wrong, none, too few, at random."""

    def drafts(name, output):
        at = len(output)
        right = plain[name][at : at + STEPS]
        kind = (list(plain).index(name) + at) % 5
        wrong = [*right[:1], *((token + 1) % V for token in right[1:2]), *right[2:]]
        return [right, wrong, [], right[:1], [at, at + 1, at + 2]][kind]

    return drafts


@pytest.mark.parametrize("first", range(0, len(KINDS), 6))
def test_a_request_draws_the_same_tokens_with_drafts_and_without(speculating, load, first):
    """Of every kind, beside others; so do log-probabilities."""
    kinds = list(KINDS)[first : first + 6]
    plain, told = decoded(speculating() if BESIDE.keys() & kinds else load(), kinds)
    runner = speculating()
    with_drafts, told_with = decoded(runner, kinds, foreseen(plain))
    assert with_drafts == plain
    assert told.keys() == told_with.keys()
    for kind, each in told.items():
        for one, other in zip(each, told_with[kind], strict=True):
            width = min(len(one[0]), len(other[0]))
            for a, b in zip(one, other, strict=True):
                a, b = (x[:width] if x.ndim else x for x in (a, b))
                torch.testing.assert_close(a, b)
    left = {reason for kind, reason in BESIDE.items() if kind in kinds}
    counts = runner._fsbench.sampling.counts
    assert set(counts.left) == left and counts.served > 0


def test_right_drafts_are_all_accepted_and_wrong_ones_are_not(speculating):
    kinds = ["plain", "repetition", "greedy", "frequency", "default"]
    plain, _ = decoded(speculating(), kinds, length=9)
    runner = speculating()
    play = Play(runner)
    for number, kind in enumerate(kinds):
        play.add(kind, request(kind, number), [*PROMPT, number])
    play.step()
    right = {kind: plain[kind][1:4] for kind in kinds}
    output = play.step(drafts=right)
    assert output.num_sampled.tolist() == [4] * 5 and output.num_rejected.tolist() == [0] * 5
    assert output.sampled_token_ids.dtype == torch.int64
    assert output.num_sampled.dtype == torch.int32
    assert output.sampled_token_ids.tolist() == [plain[kind][1:5] for kind in kinds]
    wrong = {kind: [(plain[kind][5] + 1) % V, *plain[kind][6:8]] for kind in kinds[:2]}
    output = play.step(drafts=wrong)
    assert output.num_sampled.tolist() == [1] * 5 and output.num_rejected.tolist() == [
        3,
        3,
        0,
        0,
        0,
    ]
    assert [play.output(kind) for kind in kinds] == [plain[kind][:6] for kind in kinds]


def test_what_the_next_request_was_fed_is_no_draft(speculating):
    plain, _ = decoded(speculating(), ["plain"])
    play = Play(speculating())
    play.add("plain", request("plain", 0), [*PROMPT, 0])
    play.add("next", params(seed=2), plain["plain"][:1])
    output = play.step(drafts={"next": [1]})
    assert output.num_sampled[0] == 1 and play.output("plain") == plain["plain"][:1]


def test_prompts_that_are_not_complete_give_no_token_beside_drafts(speculating):
    plain, _ = decoded(speculating(), ["plain"])
    play = Play(speculating())
    play.add("plain", request("plain", 0), [*PROMPT, 0])
    play.step()
    play.add("long", params(seed=5), [9] * 7)
    output = play.step(["long", "plain"], None, 3, {"plain": plain["plain"][1:3]})
    assert output.num_sampled.tolist() == [0, 3] and output.num_rejected.tolist() == [0, 0]
    assert play.output("plain") == plain["plain"][:4] and play.output("long") == []


def test_a_row_without_a_draw_is_token_0_for_a_draft_too(speculating):
    play = Play(speculating())
    play.add("none", params(allowed_token_ids=[3], logit_bias={3: -torch.inf}, seed=1), PROMPT)
    play.step()
    output = play.step(drafts={"none": [0, 1, 0]})
    assert output.sampled_token_ids[0, : output.num_sampled[0]].tolist() == [0, 0]


@pytest.mark.parametrize("screened", [False, True])
def test_drafts_are_those_of_the_head_and_argmax(speculating, screens, screened):
    """Of the target's own head, and of another of a reduced vocabulary."""
    hidden = torch.randn(3, D).bfloat16()
    whole = Model()
    runner = speculating("screened" if screened else "flash_sample", model=whole)
    before = DraftModelSpeculator._greedy_sample_draft(runner.speculator, hidden)
    assert runner.speculator._greedy_sample_draft(hidden).equal(before)
    assert len(runner._fsbench._made) == 1 and bool(screens) == screened

    d2t = torch.arange(V // 2)  # row i is token 2i
    small = Model()
    small.lm_head.weight = torch.randn(V // 2, D).bfloat16()
    small.logits_processor.org_vocab_size = V // 2
    small.lm_head.shard_indices.org_vocab_end_index = V // 2
    memory = runner.model_memory_usage
    runner = speculating(
        "screened" if screened else "flash_sample", speculator=DraftModelSpeculator(small, d2t)
    )
    before = DraftModelSpeculator._greedy_sample_draft(runner.speculator, hidden)
    drafts = runner.speculator._greedy_sample_draft(hidden)
    assert drafts.equal(before) and (drafts % 2 == 0).all() and drafts.dtype == torch.int64
    _, drafter = runner._fsbench._made
    assert runner.model_memory_usage - memory == drafter.extra_bytes
    small.lm_head.weight.neg_()
    small.load_weights([])
    play = Play(runner)
    play.add("two", params(seed=1), PROMPT)
    play.step()
    expected = (
        2
        * flash_sample(
            hidden, small.lm_head.weight, temperature=0.0, seed=torch.zeros(1, dtype=torch.int64)
        ).tokens
    )
    assert runner.speculator._greedy_sample_draft(hidden).equal(expected)


def _scaled(speculator):
    speculator.model.logits_processor.scale = 0.5


def _fp32(speculator):
    speculator.dtype = torch.float32


def _headless(speculator):
    del speculator.model.lm_head


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_scaled, "model: scaled logits"),
        (_fp32, "model: draft head in torch.bfloat16"),
        (_headless, "model: no lm_head.weight and logits_processor"),
    ],
)
def test_other_draft_heads_are_left_to_vllm_and_drafts_are_verified(
    speculating, caplog, change, reason
):
    speculator = DraftModelSpeculator(Model())
    change(speculator)
    with caplog.at_level("INFO", "vllm.fsbench"):
        runner = speculating(speculator=speculator)
    assert f"vLLM draws the drafts ({reason})" in caplog.text
    assert "_greedy_sample_draft" not in vars(speculator)
    assert runner._fsbench.sampling.draw is not None


def _synthetic(runner):
    runner.rejection_sampler.synthetic_conditional_rates = torch.ones(3)


def _block(runner):
    runner.rejection_sampler.use_block_verification = True


def _sampled(runner):
    runner.speculator.draft_logits = torch.zeros(1)


def _custom(runner):
    runner.rejection_sampler = types.SimpleNamespace()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_synthetic, "engine: another rule for drafts"),
        (_block, "engine: another rule for drafts"),
        (_sampled, "engine: sampled drafts"),
        (_custom, "engine: SimpleNamespace"),
    ],
)
def test_other_speculation_is_left_to_vllm(speculating, change, reason):
    runner = speculating()
    change(runner)
    assert runner._fsbench.sampling.adapter.lacks(runner, drafts=True) == reason


def test_drafts_are_verified_only_if_asked_for_and_by_what_serves_requests(
    monkeypatch, speculating
):
    assert speculating("multinomial")._fsbench.sampling.lacks == "engine: drafts"
    monkeypatch.setenv("FSBENCH_VLLM_DRAFTS", "")
    for name in OWN:
        assert speculating(name)._fsbench.sampling.lacks == "engine: drafts"


def test_rows_of_drafts_are_warmed_up_too(speculating):
    runner = speculating(max_num_tokens=9)
    sampling = runner._fsbench.sampling
    sampling.draw = recording = Recording(sampling.draw)
    runner._dummy_sampler_run(torch.randn(2, D).bfloat16())
    assert {len(rows.hidden) for rows in recording.rows} == {1, 2, 3, 5, 8}
    runner._dummy_sampler_run(torch.randn(3, D).bfloat16())
    assert {len(rows.hidden) for rows in recording.rows} == {1, 2, 3, 5, 8, 9}
