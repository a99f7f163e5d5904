"""One pass over stored logits that draws a token for each row: `gumbel_argmax`."""

from __future__ import annotations

import triton
import triton.language as tl

from fsbench.kernels.noise.contract import SMALLEST_TEMPERATURE
from fsbench.kernels.noise.group import drawing_sums, group_candidates, members
from fsbench.kernels.noise.keys import LOWEST_KEY, token_of_key
from fsbench.provider import Tensor

TOKENS_AT_ONCE = 2048
NUM_WARPS = 2
PROGRAMS_PER_MULTIPROCESSOR = 8
"""A thread has one group of 32 tokens. Within 3 % of the best of 28 settings on an H200 at every B:
4.4, 7, 13 and 30 us for [B, 151936] bf16 logits at B = 1, 16, 64 and 256."""


@triton.jit(do_not_specialize=["splits"])
def _gumbel_argmax_kernel(
    logits_ptr,  # [B, V]
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32
    keys_ptr,  # [>= B] int64, LOWEST_KEY between calls
    arrivals_ptr,  # [>= B] int32, 0 between calls
    tokens_ptr,  # [B] int64, out; packed candidates if KEYS
    first_token,  # of the logits, a multiple of 128
    stride,  # of the rows
    V,
    splits,
    KEYS: tl.constexpr,
    GREEDY: tl.constexpr,  # temperature is 0
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)
    T = tl.full((1, 1), temperature, tl.float32)
    rows = row + tl.zeros((1, 1), tl.int32)
    logits_ptr += row.to(tl.int64) * stride

    best = tl.full((1, BLOCK // 32), LOWEST_KEY, tl.int64)
    for block in tl.range(split, tl.cdiv(V, BLOCK), splits):
        v0 = block * BLOCK
        offs_v = v0 + tl.arange(0, BLOCK)
        stored = tl.load(logits_ptr + offs_v, mask=offs_v < V, other=float("-inf"))
        v0 += first_token
        y = members(stored.to(tl.float32)[None, :])
        m, sums = drawing_sums(y, T, 1.0 / T, GREEDY)
        key, _ = group_candidates(y, m, sums, v0, rows, seed, offset, T, 0, GREEDY)
        best = tl.maximum(best, key)

    tl.atomic_max(keys_ptr + row, tl.max(best))
    if tl.atomic_add(arrivals_ptr + row, 1) == splits - 1:
        winner = tl.atomic_xchg(keys_ptr + row, LOWEST_KEY)
        tl.store(tokens_ptr + row, winner if KEYS else token_of_key(winner).to(tl.int64))
        tl.atomic_xchg(arrivals_ptr + row, 0)


def gumbel_argmax(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor,
    temperature: float,
    *,
    first_token: int = 0,
    keys: bool = False,
) -> Tensor:
    """Draw one token per row of stored logits.

    Args:
        logits: [B, V] with contiguous rows, bf16, fp16 or fp32.
        seed, offset: int64 [1] on the same device.
        temperature: >= 0; 0 is greedy, and so is anything below 2^-120.
        first_token: token of the first column, a multiple of 128.
        keys: return packed candidates (noise.keys.ordered_key) in place of tokens.

    Returns:
        int64 [B]; -1 for a row with a NaN or +inf logit or without a finite one. The token is
        that of fsbench.reference.expect for these logits with group noise.
    """
    import torch

    from fsbench.kernels.configs.gpu import bind_and_launch, launching_on, multiprocessors
    from fsbench.kernels.launch.workspace import workspace

    B, V = logits.shape
    if temperature < SMALLEST_TEMPERATURE.value:
        temperature = 0.0
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    programs = multiprocessors(logits.device) * PROGRAMS_PER_MULTIPROCESSOR
    splits = max(1, min(triton.cdiv(programs, B), triton.cdiv(V, TOKENS_AT_ONCE)))
    with launching_on(logits.device):
        work = workspace(B, logits.device)
        bind_and_launch(
            _gumbel_argmax_kernel,
            (B * splits,),
            logits_ptr=logits,
            seed_ptr=seed,
            offset_ptr=offset,
            temperature=float(temperature),
            keys_ptr=work.keys,
            arrivals_ptr=work.arrivals,
            tokens_ptr=tokens,
            first_token=first_token,
            stride=logits.stride(0),
            V=V,
            splits=splits,
            KEYS=keys,
            GREEDY=temperature == 0,
            BLOCK=TOKENS_AT_ONCE,
            num_warps=NUM_WARPS,
        )
    return tokens
