"""Sums of exp(logit / T) that cannot overflow: (largest, mass) pairs, and how they add up."""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import LOG2_E, halves, log, nan_max
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


@triton.jit
def mass_of_programs(masses_ptr, programs, program, row, inverse_temperature, B):
    """(largest logit, log of the mass in units of exp(largest / T)) of rows, [R] each.

    The mass is at least 1, the largest logit's own; that of idle rows is 0 and of no use.

    Args:
        masses_ptr: fp32 [2, programs, B], (largest, mass) that each program found in each row.
        program: int32 [1, W], 0 .. W - 1: so many programs' are added up at once.
        row: int32 [R]. inverse_temperature: scalar or [R, 1].
    """
    mass = (row * 0).to(tl.float32)[:, None] + (program * 0).to(tl.float32)
    largest = mass - float("inf")
    for first in range(0, programs, program.shape[1]):
        at = masses_ptr + (first + program) * B + row[:, None]
        there = (first + program < programs) & (row < B)[:, None]
        m = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
        s = tl.load(at + programs * B, mask=there, other=0.0, cache_modifier=".cg")
        largest, mass = add_masses(largest, mass, m, s, inverse_temperature)
    row_largest = tl.reduce(largest, 1, nan_max)
    _, total = add_masses(row_largest[:, None], 0.0, largest, mass, inverse_temperature)
    return row_largest, log(tl.maximum(tl.sum(total, axis=1), 1.0))
