"""A screened head of a vocabulary shard: the tokens are those of one rank with the whole head.

As in tests/kernels/shard/test_vocab_shard.py, ranks exchange by the kernel and by collectives.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from flash_sample_cases import counter, loose_problem, problem
from ranks import KINDS, SharedLine, call_of, on_ranks, own_rows
from torch import Tensor
from torch import distributed as dist

from fsbench.errors import FsbenchError
from fsbench.kernels import (
    VocabShard,
    flash_sample,
    load_head,
    prepare_head,
    save_head,
    screened_sample,
)
from fsbench.kernels.configs.screen_choice import default_configs
from fsbench.kernels.launch.result import Screened
from fsbench.kernels.screened import head as module
from fsbench.kernels.screened.head import ScreenedHead
from fsbench.kernels.shard.exchange import AREAS, BOUNDS

pytestmark = [pytest.mark.interpreter, pytest.mark.full, pytest.mark.usefixtures("one_thread")]

B, D = 5, 32
SIZES = {2: [300, 701], 3: [257, 400, 344]}
CPU = torch.device("cpu")


def request_of(kind: str, V: int) -> dict[str, Any]:
    return {**call_of(kind, B, V), "noise": "token", "num_samples": 1}


def shard_of(rank: int, ranks: int, folder: str | None) -> tuple[Tensor, VocabShard, ScreenedHead]:
    """Return (hidden, the rank's shard, its head); folder: for buffers that kernels share."""
    hidden, weight = problem(B, sum(SIZES[ranks]), D)
    shard = VocabShard(own_rows(weight, rank, SIZES[ranks]))
    if folder is not None:
        os.makedirs(folder, exist_ok=True)
        shard.line = SharedLine(shard, folder, AREAS.value)
    return hidden, shard, prepare_head(shard.weight)


def draws(rank: int, ranks: int, folder: str | None) -> list[list[int]]:
    """Return the tokens of every kind of request, and of several samples."""
    hidden, shard, head = shard_of(rank, ranks, folder)
    V = sum(SIZES[ranks])
    several = {**call_of("everything", B, V), "noise": "token"}
    tokens = []
    for options in (*(request_of(kind, V) for kind in KINDS), several):
        sample = screened_sample(hidden, head, shard=shard, **options)
        assert torch.equal(sample.valid, (sample.tokens.view(B, -1) >= 0).all(1))
        tokens.append(sample.tokens.flatten().tolist())
    return tokens


def one_rank(ranks: int) -> list[list[int]]:
    V = sum(SIZES[ranks])
    hidden, weight = problem(B, V, D)
    several = {**call_of("everything", B, V), "noise": "token"}
    return [
        flash_sample(hidden, weight, **options).tokens.flatten().tolist()
        for options in (*(request_of(kind, V) for kind in KINDS), several)
    ]


def falls_back(rank: int, folder: str) -> list[list[int]]:
    """Return tokens and `found` of two calls; only the last rank's lists are too short.

    It begins before the others, whose bounds could make its lists short enough.
    """
    hidden, shard, head = shard_of(rank, 3, folder)
    screen, resolve = default_configs(B, D, CPU)
    if rank == 2:
        screen = replace(screen, room=1, row_room=1)
    results: list[list[int]] = []
    for step in range(2):
        while rank != 2 and not shard.line.buffer[step, 2, 0, :B].all():
            time.sleep(0.01)
        sample = screened_sample(
            hidden * 0.01, head, shard=shard, seed=counter(1), offset=counter(step),
            temperature=0.001, configs=(screen, resolve),
        )  # fmt: skip
        assert sample.found is not None
        results += [sample.tokens.tolist(), sample.found.tolist()]
    return results


STEPS = 6


def takes_turns(rank: int, folder: str) -> list[list[int]]:
    """Return the tokens of calls of changing batch size; ranks alternate between the kernels."""
    hidden, shard, head = shard_of(rank, 3, folder)
    tokens = []
    for step in range(STEPS):
        if (step + rank) % 3 == 0:
            time.sleep(0.02 * (step % 4))
        module.worth_screening = lambda *facts, yes=(step + rank) % 2 == 0: (yes, "")
        rows, seed = hidden[: 1 + step * 3 % B], counter(9)
        sample = flash_sample(rows, head, shard=shard, seed=seed, offset=counter(step))
        tokens.append(sample.tokens.tolist())
    return tokens


def drawn_loosely(
    hidden: Tensor, head: ScreenedHead, shard: VocabShard | None, step: int
) -> Screened:
    screen, resolve = default_configs(B, D, CPU)
    return screened_sample(
        hidden, head, shard=shard, seed=counter(1), offset=counter(step), temperature=0.02,
        configs=(replace(screen, room=16, row_room=512), replace(resolve, led_from=None)),
    )  # fmt: skip


def loose_shard(rank: int) -> tuple[Tensor, VocabShard, ScreenedHead]:
    hidden, weight = loose_problem(B, sum(SIZES[3]), D, 20.0)
    shard = VocabShard(own_rows(weight, rank, SIZES[3]))
    return hidden, shard, prepare_head(shard.weight)


def comes_late(rank: int, folder: str) -> list[list[int]]:
    """Return (tokens, found) of three equal calls; rank k begins call k after the others."""
    hidden, shard, head = loose_shard(rank)
    results: list[list[int]] = []
    for late in range(3):
        os.makedirs(f"{folder}/{late}", exist_ok=True)
        shard.line = line = SharedLine(shard, f"{folder}/{late}", AREAS.value)
        others = [k for k in range(3) if k != rank]
        while rank == late and not line.buffer[0, others, 0, :B].all():
            time.sleep(0.01)
        sample = drawn_loosely(hidden, head, shard, 0)
        assert sample.found is not None
        results += [sample.tokens.tolist(), sample.found.tolist()]
    return results


def meets_old_bounds(rank: int, folder: str) -> list[list[int]]:
    """Return (tokens, found) of calls that begin with high bounds of other steps, and of this."""
    hidden, shard, head = loose_shard(rank)
    os.makedirs(folder, exist_ok=True)
    shard.line = line = SharedLine(shard, folder, AREAS.value)
    results: list[list[int]] = []
    for step, other in enumerate((-1, 1, 7, 0)):
        dist.barrier()
        high = torch.tensor(1e30).view(torch.int32).item() << 32
        line.buffer[0, 0, BOUNDS.value, :B] = high | 1 << 31 | (step + other) & 0x7FFFFFFF
        dist.barrier()
        sample = drawn_loosely(hidden, head, shard, step)
        assert sample.found is not None
        results += [sample.tokens.tolist(), sample.found.tolist()]
    return results


def changes(rank: int, folder: str) -> list[object]:
    """Return tokens of a loaded head, an error, then tokens: eager and compiled."""
    hidden, shard, head = shard_of(rank, 3, None)
    path = f"{folder}/head-{rank}"
    save_head(head, path)
    head = load_head(path, shard.weight)

    def drawn() -> object:
        try:
            return screened_sample(hidden, head, shard=shard, seed=counter(1)).tokens.tolist()
        except FsbenchError as error:
            return str(error)

    results = [drawn()]
    shard.refresh(-shard._rows)
    results.append(drawn())
    head.refresh(shard.weight)
    tokens = torch.compile(drawn_by, fullgraph=True, backend="eager")(hidden, head, shard)
    return [*results, drawn(), tokens.tolist()]


def drawn_by(hidden: Tensor, head: ScreenedHead, shard: VocabShard) -> Tensor:
    return screened_sample(hidden, head, shard=shard, seed=counter(1)).tokens


def refused(rank: int) -> list[str]:
    """Return the errors for heads that do not fit a shard; nothing is exchanged."""
    hidden, shard, head = shard_of(rank, 2, None)
    other, fewer = (prepare_head(shard.weight[: shard.num_tokens - n].clone()) for n in (0, 1))
    screen, resolve = default_configs(B, D, CPU)
    wide = replace(screen, block_v=512)
    messages = []
    for call, weight, options in (
        (screened_sample, other, {"shard": shard}),
        (screened_sample, fewer, {"shard": shard}),
        (flash_sample, other, {"shard": shard}),
        (flash_sample, shard.weight, {"shard": shard}),
        (flash_sample, head, {"shard": 3}),
        (screened_sample, head, {"shard": shard, "vocab_size": 500}),
        (flash_sample, head, {"shard": shard, "return_rank": True}),
        (screened_sample, head, {"shard": shard, "configs": (wide, resolve)}),
    ):
        with pytest.raises(FsbenchError) as caught:
            call(hidden, weight, seed=counter(1), **options)
        messages.append(str(caught.value))
    return messages


def run_rank(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """Return the results of one rank for all tests below: to start a group takes longest."""
    results: dict[str, Any] = {"kernel": draws(rank, ranks, folder + "/kernel")}
    results["collectives"] = draws(rank, ranks, None)
    if ranks == 2:
        results["refused"] = refused(rank)
    if ranks == 3:
        results["falls back"] = falls_back(rank, folder + "/full")
        results["takes turns"] = takes_turns(rank, folder + "/turns")
        results["late"] = comes_late(rank, folder + "/late")
        results["old bounds"] = meets_old_bounds(rank, folder + "/old")
        results["changes"] = changes(rank, folder)
    return results


@cache
def results_of(ranks: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        return on_ranks(ranks, run_rank, ranks, folder)


@pytest.mark.parametrize("ranks", [2, 3])
def test_tokens_are_those_of_one_rank_with_the_whole_head(ranks):
    expected = one_rank(ranks)
    for rank, form in product(range(ranks), ("kernel", "collectives")):
        assert results_of(ranks)[rank][form] == expected, (rank, form)


def test_a_rank_that_computes_rows_in_full_changes_no_token_and_no_exchange():
    hidden, weight = problem(B, sum(SIZES[3]), D)
    for step in range(2):
        one = flash_sample(
            hidden * 0.01, weight, seed=counter(1), offset=counter(step), temperature=0.001,
            noise="token",
        )  # fmt: skip
        for rank, results in enumerate(results_of(3)):
            tokens, num_exact = results["falls back"][2 * step : 2 * step + 2]
            assert tokens == one.tokens.tolist()
            assert {count == -1 for count in num_exact} == {rank == 2}


def test_each_rank_may_choose_the_screen_or_the_fused_kernel():
    hidden, weight = problem(B, sum(SIZES[3]), D)
    for step in range(STEPS):
        rows = hidden[: 1 + step * 3 % B]
        one = flash_sample(rows, weight, seed=counter(9), offset=counter(step), noise="token")
        turns = [results["takes turns"][step] for results in results_of(3)]
        assert turns == [one.tokens.tolist()] * 3, step


def test_the_ranks_together_compute_the_candidates_of_one_rank():
    hidden, weight = loose_problem(B, sum(SIZES[3]), D, 20.0)
    one = drawn_loosely(hidden, prepare_head(weight), None, 0)
    assert one.found is not None and int(one.found.min()) > 3
    num_exact = torch.zeros_like(one.found)
    for late in range(3):
        for results in results_of(3):
            assert results["late"][2 * late] == one.tokens.tolist()
        # A rank that screens last has the bounds of all ranks, from its first tile on.
        num_exact += torch.tensor(results_of(3)[late]["late"][2 * late + 1])
    assert (num_exact <= one.found).all(), (num_exact, one.found)


def test_bounds_of_another_step_are_ignored():
    hidden, weight = loose_problem(B, sum(SIZES[3]), D, 20.0)
    head = prepare_head(weight)
    for step in range(4):
        one = drawn_loosely(hidden, head, None, step)
        for results in results_of(3):
            tokens, num_exact = results["old bounds"][2 * step : 2 * step + 2]
            if step < 3:
                assert tokens == one.tokens.tolist()
            else:  # one of this step prunes all
                assert tokens == [-1] * B and num_exact == [0] * B


def test_a_head_is_saved_loaded_and_refreshed_by_each_rank():
    hidden, weight = problem(B, sum(SIZES[3]), D)
    before, after = (
        screened_sample(hidden, prepare_head(w), seed=counter(1)).tokens.tolist()
        for w in (weight, -weight)
    )
    for results in results_of(3):
        first, between, last, compiled = results["changes"]
        assert (first, last, compiled) == (before, after, after)
        assert between.startswith("head: expected ")
        assert "head.refresh(" in between


@pytest.mark.full
def test_a_head_that_is_not_of_the_shard_is_named():
    of_another, fewer, chosen, no_head, no_shard, size, stored, wide = results_of(2)[1]["refused"]
    assert of_another.startswith("head: expected one of shard.weight, [489, 32], which begins at")
    assert "[488, 32]" in fewer and chosen == of_another
    assert no_head.startswith("shard: expected it with a ScreenedHead only; got it with a Tensor")
    assert no_shard == "shard: expected a VocabShard; got int"
    assert size.startswith("vocab_size: expected None with a VocabShard")
    assert stored == "return_rank: expected it off with a VocabShard"
    assert wide == "configs: expected block_v that divides 256 with a VocabShard; got 512 and 128"
