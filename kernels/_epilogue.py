"""What a fused kernel does with a tile of logits before it forgets them: device code.

`processed` turns matmul results into the logits that are sampled, `best_of_tile` merges a tile's
candidates into the running ones, and `add_mass` its share of log Z.
"""

import triton
import triton.language as tl

from fsbench.kernels._group_noise import group_candidates, group_sums, members
from fsbench.kernels._helper import candidates, greedy_candidates, nan_max, split_words


@triton.jit
def processed(logits, rows, v0, B, V, soft_cap, bias_ptr, mask_ptr, BIAS_PER_ROW: tl.constexpr):
    """soft_cap tanh(y / soft_cap), plus bias; -inf where masked, and from token V on.

    Args:
        logits: [R, WIDTH] fp32, of tokens from v0 on. rows: [R] int32; those from B on are idle.
        soft_cap: fp32 or None. bias_ptr: [V], or [B, V] with BIAS_PER_ROW, or None.
        mask_ptr: None, bool [B, V], or int32 [B, ceil(V / 32)] with bit v % 32 of word v // 32;
            true or 1 allows the token.
    """
    offs_v = v0 + tl.arange(0, logits.shape[1])
    inside = (offs_v < V)[None, :]
    row = rows.to(tl.int64)[:, None]
    if soft_cap is not None:
        # tanh x = 1 - 2 / (e^2x + 1), good at both ends.
        logits = soft_cap - 2.0 * soft_cap / (tl.exp2(logits * (2.8853900817779268 / soft_cap)) + 1)
    if bias_ptr is not None:
        if BIAS_PER_ROW:
            bias = tl.load(bias_ptr + row * V + offs_v, mask=inside & (row < B), other=0.0)
        else:
            bias = tl.load(bias_ptr + offs_v, mask=offs_v < V, other=0.0)[None, :]
        logits += bias.to(tl.float32)
    if mask_ptr is not None:
        if mask_ptr.dtype.element_ty == tl.int32:
            words = mask_ptr + row * tl.cdiv(V, 32) + (offs_v >> 5)[None, :]
            word = tl.load(words, mask=inside & (row < B), other=0)
            inside = inside & (((word >> (offs_v & 31)[None, :]) & 1) != 0)
        else:
            allowed = tl.load(mask_ptr + row * V + offs_v, mask=inside & (row < B), other=0)
            inside = inside & (allowed != 0)
    return tl.where(inside, logits, float("-inf"))


@triton.jit
def best_of_tile(logits, v0, row, seed, offset, temperature, inverse_temperature, sample,
                 best, best_logit, NOISE: tl.constexpr, GREEDY_ROWS: tl.constexpr,
                 KEEP_LOGIT: tl.constexpr):  # fmt: skip
    """Merge a tile [R, WIDTH] into best and best_logit [R, W], slice after slice.

    A slice is W words or W groups wide. Slicing bounds the registers that token noise needs: a
    whole tile's at once would spill.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    SLICE: tl.constexpr = best.shape[1] * (32 if NOISE == "group" else 4)
    if SLICE < WIDTH:
        low, high = logits.reshape(R, 2, WIDTH // 2).permute(0, 2, 1).split()
        best, best_logit = best_of_tile(
            low, v0, row, seed, offset, temperature, inverse_temperature, sample,
            best, best_logit, NOISE, GREEDY_ROWS, KEEP_LOGIT,
        )  # fmt: skip
        return best_of_tile(
            high, v0 + WIDTH // 2, row, seed, offset, temperature, inverse_temperature, sample,
            best, best_logit, NOISE, GREEDY_ROWS, KEEP_LOGIT,
        )  # fmt: skip
    else:
        if NOISE == "group":
            y = members(logits)
            m, sums = group_sums(y, inverse_temperature)
            key, logit = group_candidates(
                y, m, sums, v0, row, seed, offset, temperature, sample, GREEDY_ROWS
            )
        elif NOISE == "token":
            key, logit = candidates(logits, v0, row, seed, offset, temperature, sample, best)
        else:
            key, logit = greedy_candidates(logits, v0)
        if KEEP_LOGIT:
            best_logit = tl.where(key > best, logit, best_logit)
        return tl.maximum(best, key), best_logit


@triton.jit
def add_mass(logits, inverse_temperature, largest, mass, NOISE: tl.constexpr):
    """Add a tile's exp(y / T) to the running (largest, mass) [R, W]: sum = mass exp(largest / T).

    With group noise the sums are those that sampling needs, and the compiler computes them once.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    SLICE: tl.constexpr = largest.shape[1] * (32 if NOISE == "group" else 4)
    if SLICE < WIDTH:
        low, high = logits.reshape(R, 2, WIDTH // 2).permute(0, 2, 1).split()
        largest, mass = add_mass(low, inverse_temperature, largest, mass, NOISE)
        return add_mass(high, inverse_temperature, largest, mass, NOISE)
    elif NOISE == "group":
        m, sums = group_sums(members(logits), inverse_temperature)
        return add_masses(largest, mass, m, sums[31], inverse_temperature)
    else:
        y0, y1, y2, y3 = split_words(logits)
        m = nan_max(nan_max(y0, y1), nan_max(y2, y3))
        finite = tl.where(m == float("-inf"), 0.0, m)
        c = inverse_temperature * 1.4426950408889634
        total = tl.exp2(c * (y0 - finite)) + tl.exp2(c * (y1 - finite))
        total += tl.exp2(c * (y2 - finite)) + tl.exp2(c * (y3 - finite))
        return add_masses(largest, mass, m, total, inverse_temperature)


@triton.jit
def add_masses(largest_a, mass_a, largest_b, mass_b, inverse_temperature):
    """(largest, mass) of the union of two sets of tokens: log-sum-exp without overflow."""
    largest = nan_max(largest_a, largest_b)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    c = inverse_temperature * 1.4426950408889634
    a = mass_a * tl.exp2(c * (largest_a - finite))
    return largest, a + mass_b * tl.exp2(c * (largest_b - finite))
