"""Samplers that merge the ranks' draws in another launch, in the interpreter."""

from __future__ import annotations

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
from flash_sample_cases import counter, problem
from ranks import SharedLine, on_ranks, own_rows

from fsbench.discover import discover
from fsbench.kernels import flash_sample
from fsbench.kernels.flash_sampling_gather import choose_rank, pack_words
from fsbench.kernels.noise.keys import LOWEST_KEY
from fsbench.kernels.shard.exchange import AREAS
from fsbench.kernels.shard.merge_keys import merge_keys
from fsbench.kernels.shard.vocab_shard import pack, unpack
from fsbench.problem import Problem
from fsbench.provider import Shard

pytestmark = pytest.mark.interpreter


def test_packed_candidates_are_ordered_by_score_then_by_lower_token():
    scores = torch.tensor([-torch.inf, -3e38, -1.0, -0.0, 0.0, 1e-30, 2.0, 2.0, torch.inf])
    tokens = torch.tensor([5, 4, 3, 9, 2, 7, 8, 6, 0])
    keys = pack(scores, tokens)
    assert keys.argsort().tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert unpack(keys).tolist() == [-1, 4, 3, 9, 2, 7, 8, 6, -1]
    assert (keys > LOWEST_KEY.value).all() and unpack(keys.new_tensor([LOWEST_KEY.value])) == -1
    assert merge_keys(keys.view(3, 3)).tolist() == [8, 6, -1]
    assert ((keys >> 31) & 1 == 0).all()  # the bit that shard.exchange uses


@pytest.mark.full
def test_a_rank_is_chosen_in_proportion_to_its_mass():
    masses = torch.tensor([0.5, 0.2, 0.3])
    B = 20_000
    tokens = torch.arange(3)[:, None].expand(3, B) + 7
    logz = masses.log()[:, None].expand(3, B).float()
    words = torch.stack(
        [pack_words(pack(torch.zeros(B), tokens[k]), logz[k].contiguous()) for k in range(3)]
    )
    drawn = choose_rank(words, counter(3), counter(1)) - 7
    counts = torch.bincount(drawn, minlength=3) / B
    assert (counts - masses).abs().max() < 4 * (0.25 / B) ** 0.5
    other = choose_rank(words, counter(3), counter(2)) - 7
    assert (other == drawn).float().mean() < 0.5


def test_ranks_without_mass_are_not_chosen_and_undefined_rows_are_not_drawn():
    inf = torch.inf
    scores = torch.tensor([[-inf, inf, 1.0, -inf], [2.0, 1.0, -inf, -inf]])
    logz = torch.tensor([[torch.nan, torch.nan, 0.0, torch.nan], [0.0, 0.0, torch.nan, torch.nan]])
    tokens = torch.tensor([[1, 1, 1, 1], [2, 2, 2, 2]])
    words = torch.stack([pack_words(pack(scores[k], tokens[k]), logz[k]) for k in range(2)])
    assert choose_rank(words, counter(3), counter(1)).tolist() == [2, -1, 1, -1]


B, V, D = 6, 1500, 32
SIZES = (513, 700, 287)
SAME_AS_ONE = ("flash_sampling_all_reduce", "flash_sampling_two_step", "gumbel_argmax")


def samplers(rank: int, folder: str) -> dict[str, list[list[int]]]:
    hidden, weight = problem(B, V, D)
    shard = Shard(own_rows(weight, rank, SIZES), SIZES, rank, dist.group.WORLD)
    tokens = {}
    lines = ("flash_sampling_two_step line", "flash_sampling_screened line")
    for name in (*SAME_AS_ONE, "flash_sampling_gather", "flash_sampling_screened", *lines):
        provider = discover()[name.split()[0]].provider
        assert provider is not None and provider.build_sharded is not None
        launch = provider.build_sharded(Problem(B, D, V, "fp32", tp=3), shard)
        if name.endswith("line"):
            shard_of = launch._options["shard"] if "screened" in name else launch._head
            shard_of.line = SharedLine(shard_of, f"{folder}/{name.split()[0]}", AREAS.value)
        with torch.inference_mode():
            tokens[name] = [launch(hidden, counter(8), counter(step)).tolist() for step in range(4)]
    return tokens


@pytest.mark.full
def test_samplers_over_ranks():
    hidden, weight = problem(B, V, D)
    one = [flash_sample(hidden, weight, seed=counter(8), offset=counter(i)).tokens.tolist()
           for i in range(4)]  # fmt: skip
    screened = [flash_sample(hidden, weight, seed=counter(8), offset=counter(i), noise="token")
                .tokens.tolist() for i in range(4)]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in ("flash_sampling_two_step", "flash_sampling_screened"):
            os.mkdir(f"{folder}/{name}")
        tokens, second, third = on_ranks(3, samplers, folder)
    assert tokens == second == third
    gathered = tokens.pop("flash_sampling_gather")
    for name in ("flash_sampling_screened", "flash_sampling_screened line"):
        assert tokens.pop(name) == screened
    assert tokens == dict.fromkeys(tokens, one)
    # Other noise gives other tokens, but from all shards.
    assert gathered != one and min(map(min, gathered)) >= 0
    shards = {(token >= 513) + (token >= 1213) for row in gathered for token in row}
    assert len(shards) > 1
