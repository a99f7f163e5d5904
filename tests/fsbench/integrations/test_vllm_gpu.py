"""The plug-in in the measured vLLM with a small random model: tokens and their distribution.

The engine runs in this process, so that tests can read its model runner. About 90 s.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fsbench.integrations import vllm as plugin
from fsbench.integrations.draw import Rows
from fsbench.kernels import truncated_sample
from fsbench.machine.packages import package_version
from tests.support.small_vllm import (
    DIGITS,
    GRAMMAR,
    KINDS,
    SERVED,
    SMALL,
    STEPS,
    WITH_LOGPROBS,
    D,
    V,
    engine,
    parameters,
    prompt,
    runner_of,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.skipif(
        (package_version("vllm") or "").split("+")[0] != plugin.SUPPORTED,
        reason=f"vLLM {plugin.SUPPORTED} is not installed",
    ),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    yield from engine(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory):
    """The same with an EAGLE drafter of random weights."""
    folder = tmp_path_factory.mktemp("drafter")
    config = SMALL.config("bfloat16", 512) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config))
    speculative = {"method": "eagle", "model": str(folder), "num_speculative_tokens": STEPS}
    yield from engine(tmp_path_factory.mktemp("target"), speculative_config=speculative)


@pytest.fixture
def runner(llm):
    return runner_of(llm)


def test_every_token_is_that_of_the_kernels_called_directly(llm, runner, monkeypatch):
    """With the settings of its request, and the position that the engine fed."""
    steps = []
    draw = runner._fsbench.sampling.draw

    class Recording:
        supported, screens = draw.supported, draw.screens

        def __call__(self, rows):
            result = draw(rows)
            tensors = (*rows[:4], *(rows.filters or ()), result.tokens)
            steps.append([each.clone() for each in tensors])
            return result

    monkeypatch.setattr(runner._fsbench.sampling, "draw", Recording())
    rows = range(24)
    outputs = llm.generate([prompt(r) for r in rows], [parameters(r % 4, r) for r in rows])
    weight = runner.model.lm_head.weight[:V]  # without its padding
    drawn: dict[tuple[int, int], int] = {}  # (seed, offset) -> token
    for hidden, temperature, seed, offset, *filters, tokens in steps:
        top_k, top_p, min_p = filters or (0, 1.0, 0.0)
        direct = truncated_sample(
            *(hidden, weight),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            offset=offset,
        )
        assert torch.equal(direct.tokens, tokens)
        keys = zip(seed.tolist(), offset.tolist(), strict=True)
        drawn.update(zip(keys, tokens.tolist(), strict=True))
    for row, output in zip(rows, outputs, strict=True):
        if row % 4 in (1, 3):  # with a seed
            length = len(prompt(row)["prompt_token_ids"])
            expected = [drawn[row, length - 1 + i] for i in range(4 + row % 9)]
            assert list(output.outputs[0].token_ids) == expected


@pytest.mark.parametrize("kind", SERVED)
def test_a_seed_means_a_seed(llm, kind):
    """Alone, and with requests of every kind."""
    alone = llm.generate([prompt(3)], [parameters(kind, 3)])[0].outputs[0]
    others = [number for number in range(40) if number != 3]
    together = llm.generate(
        [prompt(3), *map(prompt, others)],
        [parameters(kind, 3), *(parameters(number % len(KINDS), number) for number in others)],
    )[0].outputs[0]
    assert alone.token_ids == together.token_ids
    if alone.logprobs is not None:
        # Hidden states of batches of other sizes may differ in the last bit.
        for token, *both in zip(alone.token_ids, alone.logprobs, together.logprobs, strict=True):
            one, other = (each[token].logprob for each in both)
            assert abs(one - other) < 0.05


def test_a_seed_means_a_seed_after_a_preemption(llm):
    """Requests of every kind with a seed, all preempted twice while they decode."""
    rows = range(4 * len(SERVED))
    settings = [parameters(SERVED[row % len(SERVED)], row) for row in rows]
    undisturbed = llm.generate([prompt(row) for row in rows], settings, use_tqdm=False)
    expected = {str(row): list(one.outputs[0].token_ids) for row, one in enumerate(undisturbed)}
    engine, got, steps = llm.llm_engine, {}, 0
    for row in rows:
        engine.add_request(str(row), prompt(row), settings[row])
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                got[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps in (3, 6):
            llm.reset_prefix_cache(reset_running_requests=True)
    assert {name: len(tokens) for name, tokens in got.items()} == {
        name: len(tokens) for name, tokens in expected.items()
    }
    # What is computed again may differ in the last bit of a hidden state.
    assert sum(got[name] == expected[name] for name in expected) >= 0.9 * len(expected)


def test_structured_output_keeps_to_its_grammar(llm, runner):
    counts = runner._fsbench.sampling.counts
    served, unserved = counts.served, sum(counts.unserved.values())
    rows = range(8)
    outputs = llm.generate([prompt(r) for r in rows], [parameters(GRAMMAR, r) for r in rows])
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert set(tokens) <= set(range(len(DIGITS))) and len(set(tokens)) > 8
    assert counts.served - served >= len(tokens) and sum(counts.unserved.values()) == unserved


@pytest.mark.parametrize("kind", WITH_LOGPROBS)
def test_log_probabilities_are_those_of_the_model(llm, runner, kind):
    """Compare with vLLM's for the same tokens, fed as a prompt."""
    from vllm import SamplingParams

    output = llm.generate([prompt(1)], [parameters(kind, 1)])[0]
    sampled = [next(iter(each.values())) for each in output.outputs[0].logprobs]
    assert min(each.rank for each in sampled) >= 1
    values = [each.logprob for each in sampled]
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    settings = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": tokens}], [settings])[0].prompt_logprobs
    first = len(tokens) - len(values)
    expected = [scored[i][tokens[i]].logprob for i in range(first, len(tokens))]
    np.testing.assert_allclose(values, expected, atol=0.05)  # vLLM rounds logits to bf16


def test_greedy_tokens_are_vllms_but_for_ties_in_bf16(llm, runner):
    """vLLM rounds logits to bf16 before it compares them; tokens differ only where that ties."""
    hidden = torch.randn(256, D, device="cuda").bfloat16()
    with torch.inference_mode():
        logits = runner.model.compute_logits(hidden)
        zeros = torch.zeros(256, device="cuda")
        counters = torch.arange(256, device="cuda")
        tokens = runner._fsbench.sampling.draw(Rows(hidden, zeros, counters, counters)).tokens
    best = logits.max(1).values
    drawn = logits.gather(1, tokens[:, None])[:, 0]
    assert (drawn >= best - best.abs() * 2**-7).all()
    assert (tokens == logits.argmax(1)).float().mean() > 0.8


def test_a_thousand_mixed_requests(llm, runner):
    """Of every kind, some cancelled, all that run preempted twice: none is lost."""
    engine, counts = llm.llm_engine, runner._fsbench.sampling.counts
    before = counts.served + sum(counts.unserved.values())
    cancelled = {str(row) for row in range(7, 1000, 50)}
    got = {}
    for row in range(1000):
        engine.add_request(str(row), prompt(row), parameters(row % len(KINDS), row))
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                got[output.request_id] = len(output.outputs[0].token_ids)
        steps += 1
        if steps == 3:
            engine.abort_request(sorted(cancelled))
        if steps in (5, 25):
            llm.reset_prefix_cache(reset_running_requests=True)  # preempts all that run
    finished = {str(row): 4 + row % 9 for row in range(1000)}
    finished = {name: tokens for name, tokens in finished.items() if name not in cancelled}
    assert {name: got.get(name) for name in finished} == finished
    drawn = counts.served + sum(counts.unserved.values()) - before
    assert drawn >= sum(finished.values())
    assert not counts.unserved and counts.served > 0


def test_drafts_change_no_token(drafting, monkeypatch):
    """Drafts of a drafter with random weights, and then right ones, for seeded requests."""
    runner = runner_of(drafting)
    speculator, sampling = runner.speculator, runner._fsbench.sampling
    assert sampling.disabled_reason == "" and "_greedy_sample_draft" in vars(speculator)
    hidden = torch.randn(64, D, device="cuda").bfloat16()
    with torch.inference_mode():
        logits = speculator.model.compute_logits(hidden)
        drafted = logits.gather(1, speculator._greedy_sample_draft(hidden)[:, None])[:, 0]
    best = logits.max(1).values
    assert (drafted >= best - best.abs() * 2**-7).all()  # vLLM rounds logits to bf16

    drawn: dict[tuple[int, int], int] = {}
    steps = []
    draw = sampling.draw

    class Recording:
        supported, screens = draw.supported, draw.screens

        def __call__(self, rows):
            result = draw(rows)
            keys = zip(rows.seed.tolist(), rows.offset.tolist(), strict=True)
            # A row behind a wrong draft is drawn again.
            drawn.update(zip(keys, result.tokens.tolist(), strict=True))
            steps.append(len(rows.hidden))
            return result

    # vLLM samples two kinds, and refuses a logit bias and min-p with drafts.
    refused = {"logit_bias", "min_p"}
    served = [kind for kind in SERVED if kind not in (5, 12) and not refused & set(KINDS[kind])]
    assert GRAMMAR in served
    rows = range(3 * len(served))
    settings = [parameters(served[row % len(served)], row) for row in rows]

    def decoded():
        monkeypatch.setattr(sampling, "draw", Recording())
        drawn.clear()
        steps.clear()
        outputs = drafting.generate([prompt(row) for row in rows], settings, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        for row, output in zip(rows, tokens, strict=True):
            first = len(prompt(row)["prompt_token_ids"]) - 1
            assert output == [drawn[row, first + i] for i in range(len(output))]
        return tokens, len(steps)

    plain, plain_steps = decoded()
    table = torch.zeros(len(rows), 32, dtype=torch.int64, device="cuda")
    for row, output in zip(rows, plain, strict=True):
        table[row, : len(output)] = torch.tensor(output)
    propose = speculator.propose

    def right(batch, *args, **kwargs):
        drafts = propose(batch, *args, **kwargs)
        states, slots = runner.req_states, batch.idx_mapping.long()
        seeds = runner.sampler.sampling_states.seeds.gpu[slots].clamp(0, len(rows) - 1)
        place = (states.total_len.gpu[slots] - states.prompt_len.gpu[slots]).clamp(0, 28).long()
        tokens = table[seeds[:, None], place[:, None] + torch.arange(STEPS, device="cuda")]
        return tokens.to(drafts.dtype)

    monkeypatch.setattr(speculator, "propose", right)
    drafted, drafted_steps = decoded()
    # Hidden states may differ in the last bit, if the batches of a step have other sizes.
    assert sum(a == b for a, b in zip(plain, drafted, strict=True)) >= 0.8 * len(rows)
    assert drafted_steps < 0.7 * plain_steps
    assert not set(sampling.counts.unserved)


def test_an_engine_with_drafts_gives_the_tokens_of_one_without(llm, drafting):
    """Two engines with the same weights, started one after the other."""
    mixed = (0, 1, 3, 4, 7, GRAMMAR)
    rows = range(8 * len(mixed))
    settings = [parameters(mixed[row % len(mixed)], row) for row in rows]
    plain, drafted = (
        [list(output.outputs[0].token_ids) for output in engine.generate(prompts, settings)]
        for engine in (llm, drafting)
        for prompts in [[prompt(row) for row in rows]]
    )
    # Hidden states may differ in the last bit, since a step of drafts has more rows.
    assert sum(a == b for a, b in zip(plain, drafted, strict=True)) >= 0.9 * len(rows)
