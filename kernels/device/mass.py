"""Sums of exp(logit / T) that cannot overflow: (largest, mass) pairs, and how they add up."""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import LOG2_E, halves, nan_max
from fsbench.kernels.noise.group import group_sums, members
from fsbench.kernels.noise.words import split_words


@triton.jit
def add_mass(logits, inverse_temperature, largest, mass, NOISE: tl.constexpr):
    """Add a tile's exp(y / T) to the running (largest, mass) [R, W]: sum = mass exp(largest / T).

    With group noise the sums are those that sampling needs, and the compiler computes them once.
    """
    WIDTH: tl.constexpr = logits.shape[1]
    SLICE: tl.constexpr = largest.shape[1] * (32 if NOISE == "group" else 4)
    if SLICE < WIDTH:
        low, high = halves(logits)
        largest, mass = add_mass(low, inverse_temperature, largest, mass, NOISE)
        return add_mass(high, inverse_temperature, largest, mass, NOISE)
    elif NOISE == "group":
        m, sums = group_sums(members(logits), inverse_temperature)
        return add_masses(largest, mass, m, sums[31], inverse_temperature)
    else:
        y0, y1, y2, y3 = split_words(logits)
        m = nan_max(nan_max(y0, y1), nan_max(y2, y3))
        finite = tl.where(m == float("-inf"), 0.0, m)
        c = inverse_temperature * LOG2_E
        total = tl.exp2(c * (y0 - finite)) + tl.exp2(c * (y1 - finite))
        total += tl.exp2(c * (y2 - finite)) + tl.exp2(c * (y3 - finite))
        return add_masses(largest, mass, m, total, inverse_temperature)


@triton.jit
def add_masses(largest_a, mass_a, largest_b, mass_b, inverse_temperature):
    """(largest, mass) of the union of two sets of tokens: log-sum-exp without overflow."""
    largest = nan_max(largest_a, largest_b)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    c = inverse_temperature * LOG2_E
    a = mass_a * tl.exp2(c * (largest_a - finite))
    return largest, a + mass_b * tl.exp2(c * (largest_b - finite))
