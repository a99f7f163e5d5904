"""Decode the best packed candidates of several ranks, after a collective has gathered them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.configs.gpu import bind_and_launch, launching_on
from fsbench.kernels.noise.keys import LOWEST_KEY, token_of_key
from fsbench.kernels.shard.vocab_shard import unpack

ROWS_AT_ONCE = 128  # rows per program


@triton.jit(do_not_specialize=["B", "K"])
def _merge_keys_kernel(
    keys_ptr,  # [K, B] int64
    tokens_ptr,  # [B] int64, out
    K,
    B,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), LOWEST_KEY, tl.int64)
    for k in range(K):
        best = tl.maximum(best, tl.load(keys_ptr + k * B + row, mask=row < B, other=LOWEST_KEY))
    tl.store(tokens_ptr + row, token_of_key(best).to(tl.int64), mask=row < B)


def merge_keys(keys: Tensor) -> Tensor:
    """Return the tokens, int64 [B], of the best packed candidates, int64 [K, B]; -1: undefined."""
    K, B = keys.shape
    if keys.device.type != "cuda":
        return unpack(keys.amax(0))
    tokens = keys.new_empty(B)
    with launching_on(keys.device):
        grid = (triton.cdiv(B, ROWS_AT_ONCE),)
        sizes = {"K": K, "B": B, "BLOCK": ROWS_AT_ONCE}
        bind_and_launch(_merge_keys_kernel, grid, keys_ptr=keys, tokens_ptr=tokens, **sizes)
    return tokens
