"""TokenHistory: what it counts, and what it refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import TokenHistory


def test_a_history_counts_what_is_appended():
    prompts, outputs = [[5, 5, 7], [1], []], [[7], [], []]
    made = TokenHistory.from_tokens(prompts, outputs, 4, "cpu")
    steps = [[5, 2, -1], [7, 2, 3], [9, 1, 3]]
    for step in steps:
        made.append(torch.tensor(step))
    for row, step in enumerate(zip(*steps, strict=True)):
        outputs[row] += [token for token in step if token >= 0]
    whole = TokenHistory.from_tokens(prompts, outputs, 4, "cpu")
    for part, expected in zip(made.dense(10), whole.dense(10), strict=True):
        assert torch.equal(part > 0, expected > 0)
    assert torch.equal(made.dense(10)[1], whole.dense(10)[1])
    assert torch.equal(made.lengths, whole.lengths) and not made.overflowed.any()
    for token in (20, 21, 20):
        made.append(torch.tensor([token, -1, -1]))
    assert made.lengths.tolist() == [4, 2, 1]
    assert made.overflowed.tolist() == [True, False, False]
    assert made.dense(30)[1][0, 20:22].tolist() == [2, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1]], [], 4), "outputs: expected one for each of 1 prompts; got 0"),
        (([[1, 2, 3]], [[4]], 3), "capacity: expected at least 4, the distinct tokens of row 0"),
        (([[1, -2]], [[]], 3), "prompts: expected token ids from 0 to 2^31 - 1 in row 0; got -2"),
        (([[1]], [[2**31]], 3), "outputs: expected token ids from 0 to 2^31 - 1 in row 0; got 2"),
        (([[1]], [[]], 0), "capacity: expected 1 to 2147483647; got 0"),
    ],
)
def test_a_history_refuses(arguments, message):
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        TokenHistory.from_tokens(*arguments, "cpu")


def test_a_history_takes_integers_of_any_kind_and_nothing_else():
    made = TokenHistory.from_tokens(
        [torch.tensor([3, 4])], [np.array([5], dtype=np.int16)], 4, "cpu"
    )
    assert made.dense(6)[0].tolist() == [[0, 0, 0, 1, 1, 1]]
    with pytest.raises(InvalidType, match="outputs: expected integers in row 0; got float"):
        TokenHistory.from_tokens([[1]], [[2.7]], 4, "cpu")


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        ([1, 2], InvalidType, "tokens: expected a tensor; got list"),
        (torch.tensor([1.9, 2.0]), InvalidType, "tokens: expected dtype .*; got torch.float32"),
        (torch.tensor([1]), InvalidArgument, r"tokens: expected shape \[2\]; got \[1\]"),
        (torch.tensor([1, 2], device="meta"), InvalidArgument, "tokens: expected it on cpu"),
        (torch.tensor([1, 2**40]), InvalidArgument, "ids below 2\\^31; got 1099511627776"),
    ],
    ids=str,
)
def test_a_history_counts_nothing_of_what_it_refuses(tokens, error, message):
    made = TokenHistory.from_tokens([[0], [7]], [[], [7]], 4, "cpu")
    before = [part.clone() for part in (made.tokens, made.counts, made.lengths)]
    with pytest.raises(error, match=message):
        made.append(tokens)
    after = (made.tokens, made.counts, made.lengths)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_history_takes_int32_and_the_largest_ids():
    made = TokenHistory(2, 4, "cpu")
    for tokens in (torch.tensor([2**31 - 1, -(2**40)]), torch.tensor([2**31 - 1, -1]).int()):
        made.append(tokens)
    assert made.tokens[0, 0] == 2**31 - 1 and made.counts[0, 0] == 2
    assert made.lengths.tolist() == [1, 0] and not made.overflowed.any()
