"""Requests of all kinds together, in engines that restart, and with planted faults of routing."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from vllm_play import BY_VLLM, KINDS, PROMPT, Play, grammars, request

from fsbench.integrations import vllm_0_26 as adapter

ALONE: dict[tuple[str, int], list[int]] = {}
"""(kind, seed) -> the tokens of a request without neighbors and faults."""


def mixed_requests(load, number: int, fault=lambda sampling: None) -> Counter[str]:
    """Decode requests of all kinds together: canceled, preempted, constrained, engines restarted.

    A request has at most 4 tokens, and must have those that it gets alone. vLLM must be called for
    the log-probabilities of BY_VLLM only.

    Args:
        fault: breaks the engine that decodes them together.

    Returns:
        How often each event happened.
    """
    random, request_kinds = np.random.default_rng(11), list(KINDS)
    waiting = [(request_kinds[i % len(request_kinds)], i) for i in reversed(range(number))]
    events: Counter[str] = Counter()
    alone, running = Play(load()), {}

    def start() -> Play:
        runner = load()
        fault(runner._fsbench.sampling)
        return Play(runner)

    def check(name: str, tokens: list[int]) -> None:
        kind, seed = running[name][0], running[name][1] % 3
        if (kind, seed) not in ALONE:
            alone.add(kind, request(kind, seed), PROMPT)
            for _ in range(4):
                alone.step(None, grammars([kind]))
            ALONE[kind, seed] = alone.remove(kind)[1]
        assert tokens == ALONE[kind, seed][: len(tokens)], name

    def check_counts(runner) -> None:
        assert runner._fsbench.sampling.counts.unserved == {}
        names = {name for names in runner.sample_calls() for name in names}
        assert all(name.startswith(BY_VLLM) for name in names)

    play = start()
    while waiting or play.slots:
        while waiting and len(play.slots) < 8:
            kind, i = waiting.pop()
            running[f"{kind} {i}"] = kind, i
            play.add(f"{kind} {i}", request(kind, i % 3), PROMPT)
        names = random.permutation(list(play.slots)).tolist()[: random.integers(1, 9)]
        play.step(names, grammars(names))
        for name in names:
            chance = random.random()
            done = len(play.output(name)) == 4
            if done or chance < 0.05:
                check(name, play.remove(name)[1])
                events["ended" if done else "canceled"] += 1
            elif chance < 0.15:
                play.preempt(name)
                events["preempted"] += 1
        if random.random() < 0.02:  # killed: its requests are sent again
            check_counts(play.runner)
            waiting += [running[name] for name in play.slots]
            play = start()
            events["restarted"] += 1
    check_counts(play.runner)
    assert events["ended"] + events["canceled"] == number
    return events


@pytest.mark.parametrize("number", [3 * len(KINDS), pytest.param(500, marks=pytest.mark.full)])
def test_seeded_requests_get_the_same_tokens_alone_and_with_others(load, number):
    events = mixed_requests(load, number)
    assert events["ended"] > number / 2 and min(events.values()) >= 1
    assert {kind for kind, _ in ALONE} == set(KINDS)
    assert all(len(set(tokens)) > 1 for tokens in ALONE.values())


def _a_neighbors_seed(sampling, monkeypatch):
    settings = adapter.settings

    def shifted(runner, slots):
        temperature, seed, *filters = settings(runner, slots)
        return (temperature, seed.roll(1), *filters)

    monkeypatch.setattr(adapter, "settings", shifted)


def _settings_of_an_earlier_batch(sampling, monkeypatch):
    cache, group_settings = {}, sampling._group_settings

    def stale(runner, batch, group, index):
        key = group.route, len(group.rows)
        return cache.setdefault(key, group_settings(runner, batch, group, index))

    sampling._group_settings = stale


def _a_mask_of_another_row(sampling, monkeypatch):
    mask = sampling._mask
    sampling._mask = lambda *args: mask(*args).roll(1, 0)


@pytest.mark.parametrize(
    "fault", [_a_neighbors_seed, _settings_of_an_earlier_batch, _a_mask_of_another_row]
)
def test_planted_faults_of_routing_are_detected(load, monkeypatch, fault):
    with pytest.raises(AssertionError, match=r" \d+\nassert"):
        mixed_requests(load, 66, lambda sampling: fault(sampling, monkeypatch))
