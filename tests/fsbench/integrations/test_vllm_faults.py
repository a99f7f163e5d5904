"""Many requests of all kinds together, in engines that die, with faults, with another dtype."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_vllm_states import D
from vllm_play import GRAMMAR, KINDS, PROMPT, Play, request

ALONE: dict[tuple[str, int], list[int]] = {}
"""(kind, seed) -> the tokens of a request without neighbors and faults."""


def tokens_alone(load, kind: str, seed: int) -> list[int]:
    if (kind, seed) not in ALONE:
        quiet = Play(load())
        quiet.add("one", request(kind, seed), PROMPT)
        for _ in range(4):
            quiet.step(None, {"one": GRAMMAR} if kind.startswith("grammar") else None)
        ALONE[kind, seed] = quiet.remove("one")[1]
    return ALONE[kind, seed]


def mixed_requests(load, number: int, fault=lambda runner: None) -> dict[str, int]:
    """Decode requests of all kinds among each other: cancelled, preempted, constrained, restarted.

    Each has 4 tokens at most. fault: what is broken in the engine that has them together; what they
    are compared with has no neighbors and no faults. Raises AssertionError for a request that is
    lost, or has other tokens than alone. Returns how often each thing happened.
    """
    random, kinds = np.random.default_rng(11), list(KINDS)
    todo = [(f"{kinds[i % len(kinds)]} {i}", kinds[i % len(kinds)], i % 3) for i in range(number)]
    happened = dict.fromkeys(("ended", "cancelled", "preempted", "restarted"), 0)

    def engine() -> Play:
        runner = load()
        fault(runner)
        return Play(runner)

    play, of, waiting = engine(), {}, list(reversed(todo))
    while waiting or play.slots:
        while waiting and len(play.slots) < 8:
            name, kind, seed = waiting.pop()
            of[name] = kind, seed
            play.add(name, request(kind, seed), PROMPT)
        names = random.permutation(list(play.slots)).tolist()[: random.integers(1, 9)]
        constrained = [name for name in names if of[name][0].startswith("grammar")]
        play.step(names, dict.fromkeys(constrained, GRAMMAR))
        for name in names:
            chance = random.random()
            done = len(play.output(name)) == 4
            if done or chance < 0.05:
                tokens = play.remove(name)[1]
                assert tokens == tokens_alone(load, *of[name])[: len(tokens)], name
                happened["ended" if done else "cancelled"] += 1
            elif chance < 0.15:
                play.preempt(name)
                happened["preempted"] += 1
        if random.random() < 0.02:  # killed: what was running is sent again
            waiting += [(name, *of[name]) for name in play.slots]
            play, happened["restarted"] = engine(), happened["restarted"] + 1
    assert happened["ended"] + happened["cancelled"] == number
    return happened


@pytest.mark.full
def test_a_thousand_requests_to_an_engine_that_dies(load):
    happened = mixed_requests(load, 1000)
    assert min(happened.values()) >= 3, happened


def _a_neighbors_seed(sampling):
    settings = sampling.adapter.settings

    def shifted(runner, slots):
        temperature, seed, *filters = settings(runner, slots)
        return (temperature, seed.roll(1), *filters)

    sampling.adapter.settings = shifted


def _a_batch_that_changed_is_not_seen(sampling):
    kept = {}
    of_group = sampling._of_group

    def stale(runner, batch, group, index):
        return kept.setdefault((group.way, len(group.rows)), of_group(runner, batch, group, index))

    sampling._of_group = stale


def _a_mask_of_another_row(sampling):
    mask = sampling._mask
    sampling._mask = lambda *given: mask(*given).roll(1, 0)


@pytest.mark.parametrize(
    "fault", [_a_neighbors_seed, _a_batch_that_changed_is_not_seen, _a_mask_of_another_row]
)
def test_planted_faults_of_routing_are_found(load, fault):
    """What the thousand would find: each within a few requests."""
    with pytest.raises(AssertionError, match=r" \d+\nassert"):
        mixed_requests(load, 60, lambda runner: fault(runner._fsbench.sampling))


def test_without_a_fault_nothing_is_found(load):
    assert mixed_requests(load, 60)["ended"] > 40


@pytest.fixture
def default_dtype():
    """Sets torch's default dtype, which engines change while they load a model."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("flash_sample", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
        ("screened", torch.bfloat16),
    ],
)
def test_torchs_default_dtype_changes_nothing(load, default_dtype, name, dtype):
    """Loaded, warmed up and asked for every kind of request under it."""

    def told():
        runner = load(name)
        runner._dummy_sampler_run(torch.zeros(4, D, dtype=torch.bfloat16))
        play = Play(runner)
        for first in range(0, len(KINDS), 8):
            kinds = list(KINDS)[first : first + 8]
            for number, kind in enumerate(kinds):
                play.add(kind, request(kind, number), PROMPT)
            constrained = [kind for kind in kinds if kind.startswith("grammar")]
            for _ in range(2):
                play.step(None, dict.fromkeys(constrained, GRAMMAR))
            for kind in kinds:
                tokens[kind] = play.remove(kind)[1]
        return dict(tokens), play.logprobs

    tokens: dict[str, list[int]] = {}
    expected, logprobs = told()
    default_dtype(dtype)
    found, mine = told()
    assert found == expected
    for kind, steps in logprobs.items():
        if kind not in ("many logprobs", "given logprobs"):  # which vLLM tells
            for one, other in zip(steps, mine[kind], strict=True):
                for a, b in zip(one, other, strict=True):
                    assert a.dtype == b.dtype and torch.equal(a, b), kind
