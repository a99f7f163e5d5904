"""What a fused kernel does with a tile of logits before it forgets them: device code.

`processed` turns matmul results into the logits that are sampled (`allowed_words` and `shared_bias`
have its inputs ready), `best_of_tile` merges a tile's candidates into the running ones.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.given import given_draws
from fsbench.kernels.noise.arithmetic import halves
from fsbench.kernels.noise.contract import candidates, greedy_candidates
from fsbench.kernels.noise.group import (
    drawing_sums,
    group_candidates,
    largest_member,
    members,
)
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered_key


@triton.jit
def allowed_words(mask_ptr, rows, v0, B, V, mask_words, WIDTH: tl.constexpr):
    """The mask of a tile, [R, WIDTH // 32] int32: bit i of word j is 1 if token 32 j + i may win.

    Loaded ahead of the tile's matmul, it costs a few registers and its latency is hidden.

    Args:
        mask_ptr: int32 [B, mask_words] with token v in bit v % 32 of word v // 32.
        rows: [R] int32; those from B on are idle.
    """
    word = v0 // 32 + tl.arange(0, WIDTH // 32)
    there = (rows < B)[:, None] & (word * 32 < V)[None, :]
    at = mask_ptr + rows.to(tl.int64)[:, None] * mask_words + word[None, :]
    return tl.load(at, mask=there, other=0)


@triton.jit
def shared_bias(bias_ptr, v0, V, WIDTH: tl.constexpr):
    """bias[v0 : v0 + WIDTH] in fp32, as allowed_words loaded ahead of the matmul."""
    offs_v = v0 + tl.arange(0, WIDTH)
    return tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)


@triton.jit
def capped(y, soft_cap):
    """soft_cap tanh(y / soft_cap)."""
    # tanh x = 1 - 2 / (e^2x + 1), good at both ends. A sum of a product that is not written as an
    # fma is fused by the assembler in one kernel and not in another.
    q = 1.0 / (tl.exp2(y * (2.8853900817779268 / soft_cap)) + 1)
    return tl.fma(q, -2.0 * soft_cap, soft_cap)


@triton.jit
def processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words):
    """soft_cap tanh(y / soft_cap), plus biases; -inf where masked, and from token V on.

    Args:
        logits: [R, WIDTH] fp32, of tokens from v0 on. rows: [R] int32; those from B on are idle.
        soft_cap: fp32 or None.
        bias: [WIDTH] fp32, the same for all rows, or None. row_bias_ptr: [B, V] or None.
        words: of allowed_words, or None.
    """
    WIDTH: tl.constexpr = logits.shape[1]
    offs_v = v0 + tl.arange(0, WIDTH)
    inside = offs_v < V
    if soft_cap is not None:
        logits = capped(logits, soft_cap)
    if bias is not None:
        logits += bias[None, :]
    if row_bias_ptr is not None:
        logits = _add_row_bias(logits, rows, v0, B, V, row_bias_ptr)
    if words is not None:
        logits = masked(logits, words)
    return tl.where(inside[None, :], logits, float("-inf"))


@triton.jit
def masked(logits, words):
    """logits [R, WIDTH], -inf where the bit of allowed_words is 0."""
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    by_word = logits.reshape(R, WIDTH // 32, 32)
    # Always 0; ties the bits to the layout of the logits: only the words move.
    zero = (by_word < float("-inf")).to(tl.int32)
    bits = (words[:, :, None] + zero) >> tl.arange(0, 32)[None, None, :]
    return tl.where((bits & 1) != 0, by_word, float("-inf")).reshape(R, WIDTH)


@triton.jit
def _add_row_bias(logits, rows, v0, B, V, row_bias_ptr):
    """logits [R, WIDTH] + row_bias[rows, v0 : v0 + WIDTH], 32 columns at a time.

    A wider load would need more registers than are left, and then wait for memory several times.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    if WIDTH > 32:
        low, high = halves(logits)
        low = _add_row_bias(low, rows, v0, B, V, row_bias_ptr)
        high = _add_row_bias(high, rows, v0 + WIDTH // 2, B, V, row_bias_ptr)
        return tl.join(low, high).permute(0, 2, 1).reshape(R, WIDTH)
    else:
        offs_v = v0 + tl.arange(0, WIDTH)
        at = row_bias_ptr + rows.to(tl.int64)[:, None] * V + offs_v[None, :]
        there = (rows < B)[:, None] & (offs_v < V)[None, :]
        return logits + tl.load(at, mask=there, other=0.0).to(tl.float32)


@triton.jit
def best_of_tile(logits, v0, row, seed, offset, temperature, inverse_temperature, first_sample,
                 best, best_logit, N: tl.constexpr, NOISE: tl.constexpr, GREEDY_ROWS: tl.constexpr,
                 KEEP_LOGIT: tl.constexpr):  # fmt: skip
    """Merge the N draws of a tile [R, WIDTH] into best and best_logit, slice after slice.

    These are [R, W] for N = 1, [R, W, >= N] for more. A slice is W words or W groups wide: it
    bounds the registers that token noise needs, a whole tile's at once would spill.

    seed: of "given" noise, the N targets of rows, [R, 1] each.
    """
    WIDTH: tl.constexpr = logits.shape[1]
    BY_GROUP: tl.constexpr = NOISE == "group" or NOISE == "given"
    SLICE: tl.constexpr = best.shape[1] * (32 if BY_GROUP else 4)
    if SLICE < WIDTH:
        low, high = halves(logits)
        best, best_logit = best_of_tile(
            low, v0, row, seed, offset, temperature, inverse_temperature, first_sample,
            best, best_logit, N, NOISE, GREEDY_ROWS, KEEP_LOGIT,
        )  # fmt: skip
        return best_of_tile(
            high, v0 + WIDTH // 2, row, seed, offset, temperature, inverse_temperature,
            first_sample, best, best_logit, N, NOISE, GREEDY_ROWS, KEEP_LOGIT,
        )  # fmt: skip
    elif NOISE == "token" and N > 1:
        # Not unrolled: Triton 3.6 would compile four draws for 81 seconds.
        for i in range(N):
            key, logit = candidates(
                logits, v0, row, seed, offset, temperature, first_sample + i, tl.max(best, 2)
            )
            best, best_logit = _merged(key, logit, i, best, best_logit, N, KEEP_LOGIT)
        return best, best_logit
    else:
        for i in tl.static_range(N):
            # What does not depend on i is computed once.
            if NOISE == "group":
                y = members(logits)
                m, sums = drawing_sums(y, temperature, inverse_temperature, GREEDY_ROWS)
                key, logit = group_candidates(
                    y, m, sums, v0, row, seed, offset, temperature, first_sample + i,
                    GREEDY_ROWS,
                )  # fmt: skip
            elif NOISE == "given":
                y = members(logits)
                index = tl.arange(0, SLICE // 32)[None, :]
                score, token, logit = given_draws(
                    y, largest_member(y), v0, index, seed[i], temperature
                )
                key = ordered_key(score, token)
            elif NOISE == "token":
                key, logit = candidates(
                    logits, v0, row, seed, offset, temperature, first_sample + i, best
                )
            else:
                key, logit = greedy_candidates(logits, v0)
            best, best_logit = _merged(key, logit, i, best, best_logit, N, KEEP_LOGIT)
        return best, best_logit


@triton.jit
def _merged(key, logit, i, best, best_logit, N: tl.constexpr, KEEP_LOGIT: tl.constexpr):
    """best and best_logit with the candidates of draw i, [R, W]."""
    if N > 1:
        mine = tl.arange(0, best.shape[2]) == i
        key = tl.where(mine[None, None, :], key[:, :, None], LOWEST_KEY)
        logit = logit[:, :, None]
    if KEEP_LOGIT:
        best_logit = tl.where(key > best, logit, best_logit)
    return tl.maximum(best, key), best_logit
