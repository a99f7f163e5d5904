"""What requests need, and every combination of it, alone and beside each other."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from fake_vllm_states import V, params
from vllm_play import PROMPT, Play

from fsbench.integrations.routing import (
    REASONS,
    Need,
    Way,
    logprob_needs,
    reason,
    route,
    shared_out,
)

ALL = [Need(bits) for bits in range(2 ** len(Need))]
OURS = ~Need.LOGITS  # all that a draw can do here
STORED = Need.FILTER | Need.OTHER_LOGPROB


def ways(needs: list[Need], able: Need = OURS) -> list[Way]:
    """The way of each row; every row has exactly one."""
    found: dict[int, Way] = {}
    for group in route(np.array(needs, np.int64), able):
        assert list(group.rows) == sorted(group.rows) and len(group.rows)
        for row in group.rows.tolist():
            assert row not in found
            found[row] = group.way
    assert sorted(found) == list(range(len(needs)))
    return [found[row] for row in range(len(needs))]


def expected(need: Need, able: Need, filtered_beside: bool = False) -> Way:
    """The table of route's docstring, in words of its own."""
    if need & ~able:
        return Way.ENGINE
    if Need.REPETITION in need:
        return Way.PENALIZED
    if need & STORED or filtered_beside:
        return Way.FILTERED
    return Way.FUSED


@pytest.mark.parametrize("able", [OURS, OURS & ~(STORED | Need.REPETITION), Need(0)])
def test_every_combination_alone_and_beside_every_kind(able):
    """Of the needs that decide, each with one that never does."""
    decide = STORED | Need.REPETITION | Need.LOGITS
    combinations = [need for need in ALL if not need & ~(decide | Need.TEMPERATURE)]
    for need, beside in product([*combinations, *Need], combinations):
        assert ways([need], able) == [expected(need, able)]
        filtered = Way.FILTERED in (expected(need, able), expected(beside, able))
        assert ways([beside, need, beside], able) == [
            expected(each, able, filtered) for each in (beside, need, beside)
        ]


def test_no_more_passes_over_the_head_than_kinds_of_draws():
    mixed = [Need(0), Need.FILTER, Need.TEMPERATURE, Need.MASK, Need.BIAS, Need.LOGPROB]
    assert len(route(np.array(mixed * 20, np.int64), OURS)) == 1


def test_reasons_are_those_that_a_draw_lacks():
    assert set(REASONS) == set(Need)
    assert reason(Need.TEMPERATURE | Need.LOGITS, OURS) == "logits"
    assert reason(Need.TOP_LOGPROBS, OURS & ~Need.TOP_LOGPROBS) == "top logprobs"
    assert reason(Need.TEMPERATURE | Need.FILTER, Need.FILTER) == "temperature"


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits"])
def test_what_log_probabilities_need(mode):
    kinds = [need for need in ALL if need < Need.LOGPROB and Need.TEMPERATURE not in need]
    for need, temperature in product(kinds, [0.0, 0.5, 1.0]):
        base = need | (Need.TEMPERATURE if temperature != 1 else Need(0))
        found = logprob_needs(
            np.full(5, base, np.int64), np.full(5, temperature), np.array([-1, 0, 1, 20, 21]), mode
        )
        drawn_from = temperature != 0.5 and not need & ~Need.MASK
        sampled = {
            "raw_logprobs": Need.LOGPROB if drawn_from else Need.LOGPROB | Need.OTHER_LOGPROB,
            "processed_logprobs": Need.LOGPROB,
        }.get(mode, Need.LOGPROB | Need.LOGITS)
        top = sampled | Need.TOP_LOGPROBS
        assert found.tolist() == [0, sampled, top, top, sampled | Need.MORE_LOGPROBS]


def test_what_a_draw_cannot_tell_of_other_tokens_the_engine_tells():
    tells, asks = Need.LOGPROB | Need.MORE_LOGPROBS, Need.LOGPROB | Need.TOP_LOGPROBS
    needs = np.array([0, Need.LOGPROB, asks, asks | Need.MASK], np.int64)
    assert shared_out(needs, tells).tolist() == [0, Need.LOGPROB, tells, tells | Need.MASK]
    for able in (OURS, Need(0)):
        assert shared_out(needs, able) is needs


NEEDS = {
    "plain": ({"temperature": 0.7}, Need.TEMPERATURE),
    "greedy": ({"temperature": 0}, Need.TEMPERATURE),
    "seed": ({"seed": 7}, Need(0)),
    "all tokens by top_k": ({"top_k": V}, Need(0)),
    "top_k": ({"top_k": 50}, Need.FILTER),
    "top_p": ({"top_p": 0.9}, Need.FILTER),
    "min_p": ({"min_p": 0.1}, Need.FILTER),
    "presence": ({"presence_penalty": 0.1}, Need.BIAS),
    "frequency": ({"frequency_penalty": 0.1}, Need.BIAS),
    "repetition": ({"repetition_penalty": 1.1}, Need.REPETITION),
    "logit_bias": ({"logit_bias": {3: 1.0}}, Need.BIAS),
    "allowed": ({"allowed_token_ids": [1, 2]}, Need.BIAS),
    "min_tokens": ({"min_tokens": 2, "all_stop_token_ids": (5,)}, Need.BIAS),
    "bad_words": ({"bad_words_token_ids": [[1], [2, 3]]}, Need.BIAS),
    "logprobs": ({"logprobs": 0}, Need.LOGPROB),
    "top logprobs": ({"logprobs": 2}, Need.LOGPROB | Need.TOP_LOGPROBS),
    "many logprobs": ({"logprobs": 21}, Need.LOGPROB | Need.MORE_LOGPROBS),
    "given logprobs": ({"logprob_token_ids": [3]}, Need.LOGPROB | Need.MORE_LOGPROBS),
    "default logprobs": (
        {"top_k": 50, "logprobs": 2},
        Need.FILTER | Need.LOGPROB | Need.OTHER_LOGPROB | Need.TOP_LOGPROBS,
    ),
}


def test_what_requests_need(load):
    """By themselves; the next request of the slot is plain again."""
    runner = load()
    play, adapter = Play(runner), runner._fsbench.sampling.adapter
    for given, expected in NEEDS.values():
        play.add("plain", params(), PROMPT)
        play.add("mine", params(**given), PROMPT)
        slots = np.array([play.slots[name] for name in ("plain", "mine", "plain")], np.int32)
        assert adapter.needs(runner, slots).tolist() == [0, int(expected), 0], given
        play.remove("mine")
        play.add("next", params(), PROMPT)
        assert play.slots["next"] == slots[1] and not adapter.needs(runner, slots).any()
        play.remove("next")
        play.remove("plain")
