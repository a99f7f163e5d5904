"""The plug-in in the measured vLLM, on a small random model: what it draws, and from which law.

The engine runs in this process, so that its model runner can be looked into. Some 90 s.
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
from fsbench.verify.statistics import g_test
from tests.support.small_vllm import (
    DIGITS,
    GRAMMAR,
    KINDS,
    SERVED,
    SMALL,
    STEPS,
    TELLING,
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
    seen = []
    draw = runner._fsbench.sampling.draw

    class Recording:
        supported, screens = draw.supported, draw.screens

        def __call__(self, rows):
            drawn = draw(rows)
            kept = [each.clone() for each in (*rows[:4], *(rows.filters or ()), drawn.tokens)]
            seen.append(kept)
            return drawn

    monkeypatch.setattr(runner._fsbench.sampling, "draw", Recording())
    rows = range(24)
    outputs = llm.generate([prompt(r) for r in rows], [parameters(r % 4, r) for r in rows])
    weight = runner.model.lm_head.weight[:V]  # without its padding
    found: dict[tuple[int, int], int] = {}
    for hidden, temperature, seed, offset, *filters, tokens in seen:
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
        for one, at, token in zip(seed.tolist(), offset.tolist(), tokens.tolist(), strict=True):
            found[one, at] = token
    for row, output in zip(rows, outputs, strict=True):
        if row % 4 in (1, 3):  # with a seed of its own
            length = len(prompt(row)["prompt_token_ids"])
            expected = [found[row, length - 1 + i] for i in range(4 + row % 9)]
            assert list(output.outputs[0].token_ids) == expected


@pytest.mark.parametrize("kind", SERVED)
def test_a_seed_means_a_seed(llm, kind):
    """Alone, and beside requests of every kind."""
    alone = llm.generate([prompt(3)], [parameters(kind, 3)])[0].outputs[0]
    others = [number for number in range(40) if number != 3]
    beside = llm.generate(
        [prompt(3), *map(prompt, others)],
        [parameters(kind, 3), *(parameters(number % len(KINDS), number) for number in others)],
    )[0].outputs[0]
    assert alone.token_ids == beside.token_ids
    if alone.logprobs is not None:
        # Hidden states of batches of other sizes may differ in the last bit.
        for token, *both in zip(alone.token_ids, alone.logprobs, beside.logprobs, strict=True):
            mine, other = (each[token].logprob for each in both)
            assert abs(mine - other) < 0.05


def test_a_seed_means_a_seed_after_a_preemption(llm):
    """Requests of every kind with a seed, all preempted twice while they decode."""
    rows = range(4 * len(SERVED))
    asked = [parameters(SERVED[row % len(SERVED)], row) for row in rows]
    undisturbed = llm.generate([prompt(row) for row in rows], asked, use_tqdm=False)
    expected = {str(row): list(one.outputs[0].token_ids) for row, one in enumerate(undisturbed)}
    engine, got, steps = llm.llm_engine, {}, 0
    for row in rows:
        engine.add_request(str(row), prompt(row), asked[row])
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
    served, left = counts.served, sum(counts.unserved.values())
    rows = range(8)
    outputs = llm.generate([prompt(r) for r in rows], [parameters(GRAMMAR, r) for r in rows])
    tokens = [token for output in outputs for token in output.outputs[0].token_ids]
    assert set(tokens) <= set(range(len(DIGITS))) and len(set(tokens)) > 8
    assert counts.served - served >= len(tokens) and sum(counts.unserved.values()) == left


@pytest.mark.parametrize("kind", TELLING)
def test_log_probabilities_are_those_of_the_model(llm, runner, kind):
    """Against vLLM's own for the same tokens, fed as a prompt; whatever is drawn from."""
    from vllm import SamplingParams

    output = llm.generate([prompt(1)], [parameters(kind, 1)])[0]
    told = [next(iter(each.values())) for each in output.outputs[0].logprobs]
    assert min(each.rank for each in told) >= 1
    ours = [each.logprob for each in told]
    tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": tokens}], [asked])[0].prompt_logprobs
    theirs = [scored[at][tokens[at]].logprob for at in range(len(tokens) - len(ours), len(tokens))]
    np.testing.assert_allclose(ours, theirs, atol=0.05)  # vLLM rounds logits to bf16


def test_greedy_rows_are_vllms_own_where_bf16_can_tell(llm, runner):
    """vLLM rounds logits to bf16 before it compares them; tokens differ only where that ties."""
    hidden = torch.randn(256, D, device="cuda").bfloat16()
    with torch.inference_mode():
        theirs = runner.model.compute_logits(hidden)
        zeros = torch.zeros(256, device="cuda")
        counters = torch.arange(256, device="cuda")
        tokens = runner._fsbench.sampling.draw(Rows(hidden, zeros, counters, counters)).tokens
    best = theirs.max(1).values
    own = theirs.gather(1, tokens[:, None])[:, 0]
    assert (own >= best - best.abs() * 2**-7).all()
    assert (tokens == theirs.argmax(1)).float().mean() > 0.8


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_law_is_that_of_vllms_own_sampler(llm, runner, temperature):
    """On the same hidden state: both against the softmax of the logits that each compares."""
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    hidden = torch.randn(1, D, device="cuda").bfloat16().repeat(4096, 1)
    temperatures = torch.full((4096,), temperature, device="cuda")
    rows = torch.arange(4096, dtype=torch.int32, device="cuda")
    seeds = torch.arange(4096, device="cuda")
    weight = runner.model.lm_head.weight[:V]  # without its padding
    laws = {
        "ours": torch.softmax(hidden[0].double() @ weight.double().T / temperature, 0),
        "vllm": torch.softmax(runner.model.compute_logits(hidden)[0].double() / temperature, 0),
    }
    counts = {name: np.zeros(V) for name in laws}
    for step in range(50):
        position = torch.full((4096,), step, device="cuda")
        ours = runner._fsbench.sampling.draw(Rows(hidden, temperatures, seeds, position)).tokens
        with torch.inference_mode():
            logits = runner.model.compute_logits(hidden).float() / temperature
        theirs = gumbel_sample(logits, rows, temperatures, seeds, position, apply_temperature=False)
        for name, tokens in (("ours", ours), ("vllm", theirs)):
            counts[name] += np.bincount(tokens.cpu().numpy(), minlength=V)
    for name, law in laws.items():
        assert law.max() < 0.5, (name, law.max())  # neither NaN nor one token alone
        order = law.argsort(descending=True).cpu().numpy()
        fit = g_test(counts[name][order], law.cpu().numpy()[order])
        assert fit.p_value > 1e-4, name


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
    """Those of the drafter, of random weights, and then right ones; both of seeded requests."""
    runner = runner_of(drafting)
    speculator, sampling = runner.speculator, runner._fsbench.sampling
    assert sampling.disabled_reason == "" and "_greedy_sample_draft" in vars(speculator)
    hidden = torch.randn(64, D, device="cuda").bfloat16()
    with torch.inference_mode():
        logits = speculator.model.compute_logits(hidden)
        own = logits.gather(1, speculator._greedy_sample_draft(hidden)[:, None])[:, 0]
    best = logits.max(1).values
    assert (own >= best - best.abs() * 2**-7).all()  # vLLM rounds logits to bf16

    drawn: dict[tuple[int, int], int] = {}
    steps = []
    draw = sampling.draw

    class Recording:
        supported, screens = draw.supported, draw.screens

        def __call__(self, rows):
            found = draw(rows)
            each = (x.tolist() for x in (rows.seed, rows.offset, found.tokens))
            # A row behind a wrong draft is drawn again.
            drawn.update({(seed, at): token for seed, at, token in zip(*each, strict=True)})
            steps.append(len(rows.hidden))
            return found

    # Two are left to vLLM, and vLLM refuses a logit bias and min-p beside drafts.
    refused = {"logit_bias", "min_p"}
    kinds = [kind for kind in SERVED if kind not in (5, 12) and not refused & set(KINDS[kind])]
    assert GRAMMAR in kinds
    rows = range(3 * len(kinds))
    asked = [parameters(kinds[row % len(kinds)], row) for row in rows]

    def decoded():
        monkeypatch.setattr(sampling, "draw", Recording())
        drawn.clear()
        steps.clear()
        outputs = drafting.generate([prompt(row) for row in rows], asked, use_tqdm=False)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        for row, mine in zip(rows, tokens, strict=True):
            first = len(prompt(row)["prompt_token_ids"]) - 1
            assert mine == [drawn[row, first + i] for i in range(len(mine))]
        return tokens, len(steps)

    plain, many = decoded()
    table = torch.zeros(len(rows), 32, dtype=torch.int64, device="cuda")
    for row, mine in zip(rows, plain, strict=True):
        table[row, : len(mine)] = torch.tensor(mine)
    propose = speculator.propose

    def right(batch, *given, **named):
        drafts = propose(batch, *given, **named)
        states, slots = runner.req_states, batch.idx_mapping.long()
        seeds = runner.sampler.sampling_states.seeds.gpu[slots].clamp(0, len(rows) - 1)
        at = (states.total_len.gpu[slots] - states.prompt_len.gpu[slots]).clamp(0, 28).long()
        foreseen = table[seeds[:, None], at[:, None] + torch.arange(STEPS, device="cuda")]
        return foreseen.to(drafts.dtype)

    monkeypatch.setattr(speculator, "propose", right)
    same, few = decoded()
    # Hidden states may differ in the last bit, if the batches of a step have other sizes.
    assert sum(a == b for a, b in zip(plain, same, strict=True)) >= 0.8 * len(rows)
    assert few < 0.7 * many
    assert not set(sampling.counts.unserved)


def test_an_engine_with_drafts_gives_the_tokens_of_one_without(llm, drafting):
    """Two engines with the same weights, started one after the other."""
    kinds = (0, 1, 3, 4, 7, GRAMMAR)
    rows = range(8 * len(kinds))
    asked = [parameters(kinds[row % len(kinds)], row) for row in rows]
    plain, drafted = (
        [list(output.outputs[0].token_ids) for output in engine.generate(prompts, asked)]
        for engine in (llm, drafting)
        for prompts in [[prompt(row) for row in rows]]
    )
    # Hidden states may differ in the last bit, since a step of drafts has more rows.
    assert sum(a == b for a, b in zip(plain, drafted, strict=True)) >= 0.9 * len(rows)
