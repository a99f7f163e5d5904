"""The epilogue of a fused kernel in portable Triton: logit processing and candidates of a tile.

`processed` turns matmul results into the logits that are sampled. `allowed_words` and `shared_bias`
load its inputs before the matmul. `best_of_tile` merges a tile's candidates into the running ones.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.targets import target_draws
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
    """Load the mask of a tile, int32 [R, WIDTH // 32]: bit i of word j is 1 if 32 j + i may win.

    A load before the tile's matmul takes a few registers, and its latency is hidden.

    Args:
        mask_ptr: int32 [B, mask_words] with token v in bit v % 32 of word v // 32.
        rows: int32 [R]; rows from B on are idle.
    """
    word = v0 // 32 + tl.arange(0, WIDTH // 32)
    in_bounds = (rows < B)[:, None] & (word * 32 < V)[None, :]
    pointers = mask_ptr + rows.to(tl.int64)[:, None] * mask_words + word[None, :]
    return tl.load(pointers, mask=in_bounds, other=0)


@triton.jit
def shared_bias(bias_ptr, v0, V, WIDTH: tl.constexpr):
    """Load bias[v0 : v0 + WIDTH] as fp32; before the matmul, like `allowed_words`."""
    offs_v = v0 + tl.arange(0, WIDTH)
    return tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0).to(tl.float32)


@triton.jit
def capped(y, soft_cap):
    """Return soft_cap tanh(y / soft_cap)."""
    # tanh x = 1 - 2 / (e^2x + 1) is accurate at both ends. The fma is explicit because the
    # assembler fuses a product and a sum in one kernel and not in another.
    q = 1.0 / (tl.exp2(y * (2.8853900817779268 / soft_cap)) + 1)
    return tl.fma(q, -2.0 * soft_cap, soft_cap)


@triton.jit
def processed(logits, rows, v0, B, V, soft_cap, bias, row_bias_ptr, words):
    """Apply the soft cap, the biases and the mask; return -inf for masked tokens and from V on.

    Args:
        logits: fp32 [R, WIDTH] of the tokens from v0 on. rows: int32 [R]; from B on they are idle.
        soft_cap: fp32 or None.
        bias: fp32 [WIDTH], shared by all rows, or None. row_bias_ptr: [B, V] or None.
        words: the result of `allowed_words`, or None.
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
    """Return logits [R, WIDTH] with -inf where the bit of `allowed_words` is 0."""
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    by_word = logits.reshape(R, WIDTH // 32, 32)
    # Always 0. It ties the bits to the layout of the logits, so that only the words move.
    zero = (by_word < float("-inf")).to(tl.int32)
    bits = (words[:, :, None] + zero) >> tl.arange(0, 32)[None, None, :]
    return tl.where((bits & 1) != 0, by_word, float("-inf")).reshape(R, WIDTH)


@triton.jit
def _add_row_bias(logits, rows, v0, B, V, row_bias_ptr):
    """Add row_bias[rows, v0 : v0 + WIDTH] to logits [R, WIDTH], 32 columns at a time.

    A wider load would run out of registers and then wait for memory several times.
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
        pointers = row_bias_ptr + rows.to(tl.int64)[:, None] * V + offs_v[None, :]
        in_bounds = (rows < B)[:, None] & (offs_v < V)[None, :]
        return logits + tl.load(pointers, mask=in_bounds, other=0.0).to(tl.float32)


@triton.jit
def best_of_tile(logits, v0, row, seed, offset, temperature, inverse_temperature, first_sample,
                 best, best_logit, N: tl.constexpr, NOISE: tl.constexpr, GREEDY_ROWS: tl.constexpr,
                 KEEP_LOGIT: tl.constexpr):  # fmt: skip
    """Merge the N draws of a tile [R, WIDTH] into best and best_logit, one slice at a time.

    A slice is W words or W groups wide. It bounds the registers that token noise needs: the noise
    of a whole tile would spill.

    Args:
        seed: the seeds; for NOISE "target" a tuple of N targets of the rows, [R, 1] each.
        best, best_logit: [R, W] if N is 1, else [R, W, >= N].
    """
    WIDTH: tl.constexpr = logits.shape[1]
    BY_GROUP: tl.constexpr = NOISE == "group" or NOISE == "target"
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
        # Not unrolled: Triton 3.6 takes 81 seconds to compile four draws.
        for i in range(N):
            key, logit = candidates(
                logits, v0, row, seed, offset, temperature, first_sample + i, tl.max(best, 2)
            )
            best, best_logit = _merged(key, logit, i, best, best_logit, N, KEEP_LOGIT)
        return best, best_logit
    else:
        for i in tl.static_range(N):
            # The compiler computes once what does not depend on i.
            if NOISE == "group":
                y = members(logits)
                m, sums = drawing_sums(y, temperature, inverse_temperature, GREEDY_ROWS)
                key, logit = group_candidates(
                    y, m, sums, v0, row, seed, offset, temperature, first_sample + i,
                    GREEDY_ROWS,
                )  # fmt: skip
            elif NOISE == "target":
                y = members(logits)
                index = tl.arange(0, SLICE // 32)[None, :]
                score, token, logit = target_draws(
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
    """Return best and best_logit with the candidates of draw i, [R, W], merged in."""
    if N > 1:
        is_sample = tl.arange(0, best.shape[2]) == i
        key = tl.where(is_sample[None, None, :], key[:, :, None], LOWEST_KEY)
        logit = logit[:, :, None]
    if KEEP_LOGIT:
        best_logit = tl.where(key > best, logit, best_logit)
    return tl.maximum(best, key), best_logit
