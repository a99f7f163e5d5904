"""FlashSampling on each rank, then an all-gather of its sample and log-mass: Algorithm I.4.

A rank draws a token from its rows and computes their log-mass L_k = log sum exp(y / T), which is
all that Lemma D.2 needs. The ranks gather one word per row, (L_k, token), and choose a rank by
Gumbel-max on L_k, with noise that is the same on all ranks and shared with no other noise. So a
plain collective carries O(1) scalars per rank and row. Tokens have the distribution of one GPU, but
are not its tokens: the noise that chooses a rank is not that of its tokens.

L_k is fp32: the odds of two ranks have an error of about 2^-22 |L_k|. On one GPU nothing is
gathered.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fsbench.kernels.noise.contract import gumbel
from fsbench.kernels.noise.keys import token_of_key
from fsbench.kernels.providing.launches import (
    FlashSampling,
    WorkspaceLaunch,
    noise_map,
    vocab_shard,
)
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Provider, Shard, Tensor

RANK_STREAM = tl.constexpr(3 << 16)
"""Counter word 3 of the noise that chooses a rank: no Philox block is shared with other noise."""
ROWS_AT_ONCE = 128  # rows per program


@triton.jit(do_not_specialize=["B"])
def _pack_kernel(
    keys_ptr,  # [B] int64, this rank's candidates
    logz_ptr,  # [B] fp32, of its tokens
    words_ptr,  # [B] int64, out: the bits of its log-mass, then its token
    B,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_ptr + row, mask=row < B, other=0)
    log_mass = tl.load(logz_ptr + row, mask=row < B)
    # Rows without a draw: +inf for a NaN or +inf logit, -inf without a finite logit.
    log_mass = tl.where(
        token_of_key(key) >= 0, log_mass, tl.where(key > 0, float("inf"), float("-inf"))
    )
    bits = log_mass.to(tl.int32, bitcast=True).to(tl.int64)
    tl.store(words_ptr + row, (bits << 32) | (0x7FFFFFFF - (key & 0x7FFFFFFF)), mask=row < B)


@triton.jit(do_not_specialize=["B", "K"])
def _choose_rank_kernel(
    words_ptr,  # [K, B] int64
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    tokens_ptr,  # [B] int64, out
    K,
    B,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(seed_ptr)
    step = tl.load(offset_ptr).to(tl.int32) + row * 0
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = tl.full((BLOCK,), -1, tl.int64)
    for k in range(K):
        word = tl.load(words_ptr + k * B + row, mask=row < B, other=0)
        log_mass = (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        bits, _, _, _ = tl.philox(seed, row * 0 + k, row, step, row * 0 + RANK_STREAM)
        score = log_mass + gumbel(bits)
        better = score > best
        best = tl.where(better, score, best)
        chosen = tl.where(better, word & 0x7FFFFFFF, chosen)
    chosen = tl.where(best < float("inf"), chosen, -1)
    tl.store(tokens_ptr + row, chosen, mask=row < B)


def choose_rank(words: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
    """Choose a rank for each row; return its tokens, int64 [B].

    Args:
        words: int64 [K, B], (log-mass, token) of each rank and row. The log-mass is -inf for a rank
            without mass in a row; +inf makes the row undefined (-1).
    """
    from fsbench.kernels.configs.gpu import bind_and_launch, launching_on

    K, B = words.shape
    tokens = words.new_empty(B)
    with launching_on(words.device):
        bind_and_launch(
            _choose_rank_kernel,
            (triton.cdiv(B, ROWS_AT_ONCE),),
            words_ptr=words,
            seed_ptr=seed,
            offset_ptr=offset,
            tokens_ptr=tokens,
            K=K,
            B=B,
            BLOCK=ROWS_AT_ONCE,
        )
    return tokens


def pack_words(keys: Tensor, logz: Tensor) -> Tensor:
    """Pack candidates, int64 [B], and log-masses, fp32 [B], into a rank's words, int64 [B]."""
    from fsbench.kernels.configs.gpu import bind_and_launch, launching_on

    words = keys.new_empty(len(keys))
    with launching_on(keys.device):
        grid = (triton.cdiv(len(keys), ROWS_AT_ONCE),)
        bind_and_launch(
            _pack_kernel,
            grid,
            keys_ptr=keys,
            logz_ptr=logz,
            words_ptr=words,
            B=len(keys),
            BLOCK=ROWS_AT_ONCE,
        )
    return words


class _Gathered(WorkspaceLaunch):
    def __init__(self, problem: Problem, shard: Shard):
        self._head = vocab_shard(shard)
        super().__init__(problem, self._head.weight)

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels.fused.api import local_draw

        drawn = local_draw(hidden, self._head, seed, offset, self._temperature, return_logz=True)
        assert drawn.logz is not None
        words = pack_words(drawn.tokens, drawn.logz)
        return choose_rank(self._head.gather(words), seed, offset)


PROVIDER = Provider(
    name="flash_sampling_gather",
    label="FlashSampling + all-gather (Alg. I.4)",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=Capabilities(fused=True, host_sync_free=True, batch_invariant=True),
    build=FlashSampling,
    build_sharded=_Gathered,
    presets=("tp",),
)
