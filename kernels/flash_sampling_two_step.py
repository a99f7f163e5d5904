"""Ablation: FlashSampling that exchanges candidates between ranks in a second launch.

The memory and the words are those of flash_sampling over several GPUs, but a second kernel sends
them after the first has ended, not its last program. The difference in time is the gain of an
exchange inside the kernel.

The two steps are not the two stages of the paper's Algorithm 1. There stage 2 reduces the
candidates of all tiles; here the first kernel does that, as flash_sampling does, and the second
launch gets one candidate per rank and row. On one GPU it only decodes the tokens.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from fsbench.kernels.noise.keys import token_of_key
from fsbench.kernels.providing.launches import (
    CANDIDATES_ONLY,
    MergedLater,
    decode,
    noise_map,
    vocab_shard,
)
from fsbench.kernels.shard.exchange import best_of_ranks
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider, Shard

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.shard.vocab_shard import VocabShard

ROWS_AT_ONCE = 64  # rows per program


@triton.jit(do_not_specialize=["B", "rank"])
def _exchange_kernel(
    keys_ptr,  # [B] int64, this rank's candidates
    tokens_ptr,  # [B] int64, out
    buffers_ptr,  # this and the next four: as in flash_sampling_kernel
    counts_ptr,
    rank,
    area,
    B,
    RANKS: tl.constexpr,
    WATCH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = row < B
    key = tl.load(keys_ptr + row, mask=in_bounds, other=0)
    line = (buffers_ptr, counts_ptr, rank, area)
    best, _ = best_of_ranks(key, (), row, in_bounds, line, RANKS, WATCH)
    tl.store(tokens_ptr + row, token_of_key(best).to(tl.int64), mask=in_bounds)


def exchange(keys: Tensor, shard: VocabShard) -> Tensor:
    """Return the tokens, int64 [B], of all ranks' best candidates; keys: this rank's, int64 [B]."""
    from fsbench.kernels.configs.gpu import bind_and_launch, launching_on
    from fsbench.kernels.shard.merge_keys import merge_keys

    if shard.line is None:
        return merge_keys(shard.gather(keys))
    tokens = keys.new_empty(len(keys))
    with launching_on(keys.device):
        bind_and_launch(
            _exchange_kernel,
            (triton.cdiv(len(keys), ROWS_AT_ONCE),),
            keys_ptr=keys,
            tokens_ptr=tokens,
            buffers_ptr=shard.line.buffers,
            counts_ptr=shard.line.counts,
            rank=shard.rank,
            area=shard.slots,
            B=len(keys),
            RANKS=shard.ranks,
            WATCH=keys.device.type == "cuda",
            BLOCK=ROWS_AT_ONCE,
        )
    return tokens


def build_sharded(problem: Problem, shard: Shard) -> Launch:
    head = vocab_shard(shard)
    return MergedLater(problem, head, partial(exchange, shard=head))


PROVIDER = Provider(
    name="flash_sampling_two_step",
    label="FlashSampling, exchange after the kernel",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=CANDIDATES_ONLY,
    build=partial(MergedLater, merge=decode),
    build_sharded=build_sharded,
    presets=("tp",),
)
