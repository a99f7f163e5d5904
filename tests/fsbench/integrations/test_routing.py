"""The needs of requests, and the groups that rows with any combination of needs come to."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from fake_vllm_states import V, params
from vllm_play import PROMPT, Play

from fsbench.integrations import vllm_0_26 as adapter
from fsbench.integrations.routing import (
    REASONS,
    Need,
    Route,
    delegate_logprobs,
    group_rows,
    logprob_needs,
    reason,
)

ALL = ~Need.LOGITS  # everything that a draw supports here
STORED = Need.FILTER | Need.OTHER_LOGPROB


def routes(needs: list[Need], supported: Need) -> list[Route]:
    """Return the route of each row; check that every row is in one group."""
    groups = group_rows(np.array(needs, np.int64), supported)
    by_row = {row: group.route for group in groups for row in group.rows.tolist()}
    rows = np.concatenate([group.rows for group in groups])
    assert sorted(rows) == list(range(len(needs))) == sorted(by_row)
    assert all((np.diff(group.rows) > 0).all() for group in groups)
    return [by_row[row] for row in range(len(needs))]


def expected(need: Need, supported: Need, has_filtered: bool = False) -> Route:
    """Return the route by the table in group_rows's docstring."""
    if need & ~supported:
        return Route.ENGINE
    if Need.REPETITION in need:
        return Route.PENALIZED
    return Route.FILTERED if need & STORED or has_filtered else Route.FUSED


@pytest.mark.parametrize("supported", [ALL, ALL & ~(STORED | Need.REPETITION), Need(0)])
def test_routes_of_every_combination_alone_and_with_neighbors(supported):
    """All combinations of the needs that decide, and each need that does not."""
    deciding = STORED | Need.REPETITION | Need.LOGITS | Need.TEMPERATURE
    combinations = [need for need in map(Need, range(2 ** len(Need))) if not need & ~deciding]
    for need, neighbor in product([*combinations, *Need], combinations):
        assert routes([need], supported) == [expected(need, supported)]
        both = [expected(each, supported) for each in (need, neighbor)]
        batch = [neighbor, need, neighbor]
        assert routes(batch, supported) == [
            expected(each, supported, Route.FILTERED in both) for each in batch
        ]


def test_reasons_are_the_needs_that_are_not_supported():
    assert set(REASONS) == set(Need)
    assert reason(Need.TEMPERATURE | Need.LOGITS, ALL) == "logits"
    assert reason(Need.TOP_LOGPROBS, ALL & ~Need.TOP_LOGPROBS) == "top logprobs"
    assert reason(Need.TEMPERATURE | Need.FILTER, Need.FILTER) == "temperature"


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_needs_of_log_probabilities(mode):
    others = [Need(0), Need.MASK, Need.BIAS, Need.FILTER, Need.REPETITION]
    for need, temperature in product(others, [0.0, 0.5, 1.0]):
        base = need | (Need.TEMPERATURE if temperature != 1 else Need(0))
        added = logprob_needs(
            np.full(5, base, np.int64), np.full(5, temperature), np.array([-1, 0, 1, 20, 21]), mode
        )
        unchanged = temperature != 0.5 and need in (Need(0), Need.MASK)
        sampled = {
            "raw_logprobs": Need.LOGPROB if unchanged else Need.LOGPROB | Need.OTHER_LOGPROB,
            "processed_logprobs": Need.LOGPROB,
        }.get(mode, Need.LOGPROB | Need.LOGITS)
        top = sampled | Need.TOP_LOGPROBS
        assert added.tolist() == [0, sampled, top, top, sampled | Need.MORE_LOGPROBS]


def test_the_engine_computes_log_probabilities_that_a_draw_does_not():
    supported, top = Need.LOGPROB | Need.MORE_LOGPROBS, Need.LOGPROB | Need.TOP_LOGPROBS
    needs = np.array([0, Need.LOGPROB, top, top | Need.MASK], np.int64)
    assert delegate_logprobs(needs, supported).tolist() == [
        *(0, Need.LOGPROB, supported, supported | Need.MASK),
    ]
    for unchanged in (ALL, Need(0)):
        assert delegate_logprobs(needs, unchanged) is needs


TOP = Need.LOGPROB | Need.TOP_LOGPROBS
NEEDS = [
    ({"temperature": 0.7}, Need.TEMPERATURE),
    ({"temperature": 0}, Need.TEMPERATURE),
    ({"seed": 7}, Need(0)),
    ({"top_k": V}, Need(0)),
    ({"top_k": 50}, Need.FILTER),
    ({"top_p": 0.9}, Need.FILTER),
    ({"min_p": 0.1}, Need.FILTER),
    ({"presence_penalty": 0.1}, Need.BIAS),
    ({"frequency_penalty": 0.1}, Need.BIAS),
    ({"repetition_penalty": 1.1}, Need.REPETITION),
    ({"logit_bias": {3: 1.0}}, Need.BIAS),
    ({"allowed_token_ids": [1, 2]}, Need.BIAS),
    ({"min_tokens": 2, "all_stop_token_ids": (5,)}, Need.BIAS),
    ({"bad_words_token_ids": [[1], [2, 3]]}, Need.BIAS),
    ({"logprobs": 0}, Need.LOGPROB),
    ({"logprobs": 2}, TOP),
    ({"logprobs": 21}, Need.LOGPROB | Need.MORE_LOGPROBS),
    ({"logprob_token_ids": [3]}, Need.LOGPROB | Need.MORE_LOGPROBS),
    ({"top_k": 50, "logprobs": 2}, Need.FILTER | Need.OTHER_LOGPROB | TOP),
]


def test_needs_of_requests(load):
    """The next request in the same slot has no needs."""
    runner = load()
    play = Play(runner)
    play.add("plain", params(), PROMPT)
    for settings, need in NEEDS:
        play.add("one", params(**settings), PROMPT)
        slots = np.array([play.slots[name] for name in ("plain", "one", "plain")], np.int32)
        assert adapter.request_needs(runner, slots).tolist() == [0, int(need), 0], settings
        play.remove("one")
        play.add("next", params(), PROMPT)
        assert play.slots["next"] == slots[1] and not adapter.request_needs(runner, slots).any()
        play.remove("next")
