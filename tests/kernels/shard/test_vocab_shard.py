"""flash_sample over several ranks: the tokens are those of one rank, for any split.

On the CPU, in two forms: the reference with collectives of gloo, and the kernel itself in Triton's
interpreter, with its exchange in memory that the processes share.
"""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import time
from datetime import timedelta
from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from flash_sample_cases import counter, problem
from ranks import KINDS, SharedLine, call_of, on_ranks, own_rows
from torch import Tensor

from fsbench.errors import InvalidArgument, InvalidType
from fsbench.kernels import VocabShard, even_blocks, flash_sample, score
from fsbench.kernels.shard.exchange import AREAS
from fsbench.kernels.shard.vocab_shard import SHARD_UNIT, block_bounds


@pytest.mark.parametrize("V", [256 * 8, 5000, 151936])
def test_the_most_even_split_has_bounds_at_blocks(V):
    for ranks in (1, 2, 3, 7, 8):
        bounds = even_blocks(V, ranks)
        assert bounds[0] == 0 and bounds[-1] == V and len(bounds) == ranks + 1
        assert all(bound % SHARD_UNIT == 0 for bound in bounds[:-1])
        sizes = [last - first for first, last in pairwise(bounds)]
        assert 0 < max(sizes) - min(sizes) + 1 <= 2 * SHARD_UNIT
        assert block_bounds(sizes, V) == bounds


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 2), InvalidArgument, "V: expected 1 to 2147483648; got 0"),
        ((5000, 0), InvalidArgument, "ranks: expected 1 to 2147483648; got 0"),
        ((5000.0, 2), InvalidType, "V: expected an integer; got float"),
        ((5000, True), InvalidType, "ranks: expected an integer; got bool"),
    ],
)
def test_wrong_splits_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        even_blocks(*arguments)


def test_bounds_are_rounded_up_to_blocks_and_a_rank_without_a_block_is_named():
    assert block_bounds([257, 400, 343], 1000) == [0, 512, 768, 1000]
    assert block_bounds([500, 500], 900) == [0, 512, 900]
    with pytest.raises(InvalidArgument, match="rank 1 of 2 has none"):
        block_bounds([512, 100], 512)
    with pytest.raises(InvalidArgument, match="at most 600, the rows of all shards; got 601"):
        block_bounds([300, 300], 601)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_shard_is_not_copied(copied):
    with pytest.raises(InvalidType, match=r"VocabShard: expected not to be copied .* all ranks"):
        copied(VocabShard.__new__(VocabShard))


def test_a_shard_without_a_process_group_says_what_to_do():
    with pytest.raises(InvalidArgument, match=r"group: .*torch\.distributed\.init_process_group"):
        VocabShard(torch.zeros(300, 16))


D = 32
RANKS = 3
SIZES = [257, 400, 343]
"""Rows of the ranks. Other tests have two ranks: tests/kernels/test_sharded_samplers.py."""


def answers(hidden: Tensor, head: Tensor | VocabShard, kind: str, V: int) -> list[list[float]]:
    """Return the fields of a draw, then those of a score."""
    call = call_of(kind, 5, V)
    drawn = flash_sample(hidden, head, return_logprob=True, return_logz=True, **call)
    targets = torch.tensor([[0, V - 1], [300, 5], [-100, V], [256, 255], [V - 1, V - 2]])
    processing = {
        name: call[name] for name in ("temperature", "bias", "mask", "soft_cap") if name in call
    }
    fields = (*drawn, *score(hidden, head, targets, return_entropy=True, **processing))
    return [field.double().flatten().tolist() for field in fields if field is not None]


def shard_of(rank: int, sizes: list[int], weight: Tensor, **options: object) -> VocabShard:
    return VocabShard(own_rows(weight, rank, sizes), **options)


def draws(rank: int, sizes: list[int], folder: str | None) -> list[list[list[float]]]:
    hidden, weight = problem(5, sum(sizes), D)
    shard = shard_of(rank, sizes, weight)
    if folder is not None:
        shard.line = SharedLine(shard, folder, AREAS.value)
    with torch.inference_mode():
        return [answers(hidden, shard, kind, sum(sizes)) for kind in KINDS]


def results_of(rank: int, folder: str) -> dict[str, Any]:
    """Return the results of one rank for all tests, since starting a group is slow."""
    return {
        "collectives": draws(rank, SIZES, None),
        "kernel": draws(rank, SIZES, folder),
        "too many": too_many(rank),
        "padded": padded(rank),
        "race": race(rank, folder + "/race"),
        "unequal": unequal(rank),
        "changed": [changed(rank, sizes) for sizes in (SIZES, [256, 256, 488])],
    }


@cache
def group_results() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        os.mkdir(folder + "/race")
        return on_ranks(RANKS, results_of, folder)


@pytest.mark.interpreter
def test_tokens_are_those_of_one_rank_and_the_same_on_all():
    V = sum(SIZES)
    hidden, weight = problem(5, V, D)
    for i, kind in enumerate(KINDS):
        one = answers(hidden, weight, kind, V)
        for rank, form in product(range(RANKS), ("collectives", "kernel")):
            results, first = (group_results()[k][form][i] for k in (rank, 0))
            assert results[:2] == one[:2], (kind, rank, form)
            if form == "kernel":
                assert str(results) == str(one), (kind, rank)
            # The reference sums in the order of the ranks.
            assert torch.allclose(
                torch.cat([*map(torch.tensor, results)]), torch.cat([*map(torch.tensor, one)]),
                atol=2e-5, rtol=1e-5, equal_nan=True,
            )  # fmt: skip
            assert str(results) == str(first), (kind, form)


STEPS = 8


def race(rank: int, folder: str) -> list[list[int]]:
    """Many calls of changing batch size, while one rank is slow at some of them."""
    hidden, weight = problem(7, 600, 16)
    shard = shard_of(rank, [256, 256, 88], weight)
    shard.line = SharedLine(shard, folder, AREAS.value)
    tokens = []
    for step in range(STEPS):
        if (step + rank) % 3 == 0:
            time.sleep(0.02 * (step % 4))
        rows = 1 + (step * 5) % 7
        sample = flash_sample(hidden[:rows], shard, seed=counter(1), offset=counter(step))
        tokens.append(sample.tokens.tolist())
    return tokens


@pytest.mark.full
@pytest.mark.interpreter
def test_no_rank_overtakes_another_in_the_kernel():
    tokens = [results["race"] for results in group_results()]
    hidden, weight = problem(7, 600, 16)
    for step in range(STEPS):
        rows = 1 + (step * 5) % 7
        sample = flash_sample(hidden[:rows], weight, seed=counter(1), offset=counter(step))
        assert [tokens[rank][step] for rank in range(3)] == [sample.tokens.tolist()] * 3, step


def unequal(rank: int) -> str:
    try:
        VocabShard(torch.zeros(256, 16 + 16 * (rank == 1)))
    except InvalidArgument as error:
        return str(error)
    return "no error"


@pytest.mark.interpreter
def test_shards_that_do_not_fit_each_other_are_refused_on_every_rank():
    messages = [results["unequal"] for results in group_results()]
    assert "on rank 1" in messages[0]
    assert all("the same D, dtype and device on all ranks" in message for message in messages)


def changed(rank: int, sizes: list[int]) -> list[object]:
    """Return tokens before the weight changes, tokens or the error after, tokens after refresh."""
    hidden, weight = problem(5, sum(sizes), D)
    rows = own_rows(weight, rank, sizes)
    shard = VocabShard(rows)
    results: list[object] = [flash_sample(hidden, shard, seed=counter(1)).tokens.tolist()]
    rows.neg_()
    try:
        results.append(flash_sample(hidden, shard, seed=counter(1)).tokens.tolist())
    except InvalidArgument as error:
        results.append(str(error))
    shard.refresh(rows)
    return [*results, flash_sample(hidden, shard, seed=counter(1)).tokens.tolist()]


@pytest.mark.interpreter
def test_a_copied_shard_whose_weight_changed_is_refused_until_it_is_refreshed():
    for i, sizes in enumerate((SIZES, [256, 256, 488])):
        hidden, weight = problem(5, sum(sizes), D)
        before, after = (
            flash_sample(hidden, head, seed=counter(1)).tokens.tolist()
            for head in (weight, -weight)
        )
        for rank in range(3):
            first, refused, last = group_results()[rank]["changed"][i]
            assert (first, last) == (before, after)
            if i == 0:
                assert "shard: expected an unchanged weight" in refused
            else:  # nothing is copied: the rows themselves are drawn from
                assert refused == after


def too_many(rank: int) -> list[str]:
    hidden, weight = problem(5, 768, 16)
    shard = shard_of(rank, [256, 256, 256], weight, slots=16)
    messages = []
    for options in ({"num_samples": 4}, {"vocab_size": 500}, {"return_rank": True}):
        with pytest.raises(InvalidArgument) as caught:
            flash_sample(hidden, shard, seed=counter(1), **options)
        messages.append(str(caught.value))
    with pytest.raises(InvalidArgument) as caught:
        score(hidden, shard, counter(1, 2, 3, 4, 5), return_rank=True)
    return [*messages, str(caught.value)]


@pytest.mark.full
@pytest.mark.interpreter
def test_options_that_a_shard_refuses_are_named():
    assert group_results()[1]["too many"] == [
        "hidden: expected at most 16 rows times samples (up to 4 at a time), the slots of the "
        "VocabShard; got 5 times 4",
        "vocab_size: expected None with a VocabShard, which has one",
        "return_rank: expected it off with a VocabShard",
        "return_rank: expected False with a VocabShard; got True",
    ]


def leaves(rank: int) -> str:
    hidden, weight = problem(2, 512, 16)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=15))
    shard = shard_of(rank, [256, 256], weight, group=group)
    flash_sample(hidden, shard, seed=counter(1))
    if rank == 1:
        return "left"
    try:
        flash_sample(hidden, shard, seed=counter(1))
    except RuntimeError as error:
        return type(error).__name__
    return "no error"


@pytest.mark.full
def test_an_absent_rank_is_an_error_on_the_others():
    assert on_ranks(2, leaves) == ["RuntimeError", "left"]


def padded(rank: int) -> list[int]:
    hidden, weight = problem(4, 700, 16)
    weight[600:] = 100.0 * hidden[0]  # would win if they were tokens
    shard = shard_of(rank, [250, 250, 200], weight, vocab_size=600)
    return flash_sample(hidden, shard, seed=counter(3)).tokens.tolist()


@pytest.mark.full
@pytest.mark.interpreter
def test_padding_rows_are_no_tokens():
    hidden, weight = problem(4, 700, 16)
    one = flash_sample(hidden, weight, vocab_size=600, seed=counter(3)).tokens.tolist()
    assert [results["padded"] for results in group_results()] == [one] * RANKS
