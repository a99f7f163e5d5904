"""Sums of exp(logit / T) that depend neither on the order of the logits nor on who adds them up.

A group of 32 tokens (noise.group) is summed up in the order of its ids: in floating point, and the
same bits everywhere. From there on sums are exact, in integers. So log Z, and with it each
log-probability, is a function of a row's logits: any tile, program, kernel and rank has its bits.

The mass of a set of groups is a tuple (window, high, low): high + low 2^-32 in units of 2^window.

    window  fp32, a multiple of 32: that of its largest group, where a group's window is its binary
            exponent, rounded down
    high    int64, sum of the integer parts of the groups of this window
    low     int64, sum of the next 32 bits of these, and of the integer parts one window below

What is further below is left out: of each group less than 2^-32 of the sum. Digits are never
carried from low to high, so it does not matter which groups were added up first.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import LOG2_E, log
from fsbench.kernels.noise.group import group_sums, members

LN_2 = tl.constexpr(0.6931471805599453)
WINDOW = tl.constexpr(32.0)
FURTHEST = tl.constexpr(2.0**128 - 2.0**104)
"""The largest fp32 number: where binary exponents of exp(logit / T) end."""


@triton.jit
def no_mass(zero):
    """The mass of no group, of the shape of `zero`: fp32 zeros."""
    return zero - float("inf"), zero.to(tl.int64), zero.to(tl.int64)


@triton.jit
def binary_exponent(y, inverse_temperature):
    """exp(y / T) = 2^(n + f): n a whole number in fp32, f in [-0.5, 1.5]."""
    c = inverse_temperature * LOG2_E
    # The bounds also keep the product from being fused with a sum, here and there differently.
    e = tl.minimum(tl.maximum(c * y, -FURTHEST), FURTHEST)
    lost = tl.where(tl.abs(e) < 16777216.0, tl.fma(c, y, -e), 0.0)
    n = tl.floor(e)
    return n, (e - n) + lost


@triton.jit
def mass_of_groups(m, s, inverse_temperature):
    """The mass of each group, s exp(m / T), from what group_sums returns."""
    n, f = binary_exponent(m, inverse_temperature)
    bits = (s * tl.exp2(f)).to(tl.int32, bitcast=True)
    # Products with powers of two are exact, fused or not.
    window = WINDOW * tl.floor((n + ((bits >> 23) - 127).to(tl.float32)) * (1.0 / WINDOW))
    scaled = (bits + ((n - window).to(tl.int32) << 23)).to(tl.float32, bitcast=True)
    high = tl.floor(scaled)
    return window, high.to(tl.int64), ((scaled - high) * 4294967296.0).to(tl.int64)


@triton.jit
def add_masses(a, b):
    """The mass of the union of two sets of groups. Associative and commutative, to the bit."""
    window = tl.maximum(a[0], b[0])
    high_a, low_a = _digits(a, window)
    high_b, low_b = _digits(b, window)
    return window, high_a + high_b, low_a + low_b


@triton.jit
def _digits(mass, window):
    """(high, low) of a mass in a window that is not below its own."""
    own, high, low = mass
    below = window - own
    low = tl.where(below == 0.0, low, tl.where(below == WINDOW, high, 0))
    return tl.where(below == 0.0, high, 0), low


@triton.jit
def add_tile(logits, inverse_temperature, mass):
    """Add a tile [R, WIDTH] to the mass [R, WIDTH / 32] of its columns' groups.

    With group noise the sums are those that sampling needs, and the compiler computes them once.
    """
    m, sums = group_sums(members(logits), inverse_temperature)
    return add_masses(mass, mass_of_groups(m, sums[31], inverse_temperature))


@triton.jit
def mass_of_rows(mass):
    """The masses of rows, [R] each, from those [R, W] of parts of them."""
    window = tl.max(mass[0], axis=1)
    high, low = _digits(mass, window[:, None])
    return window, tl.sum(high, axis=1), tl.sum(low, axis=1)


@triton.jit
def store_mass(masses_ptr, mass, programs, program, row, B, there):
    """Leave the masses of rows, [R], for mass_of_programs."""
    window, high, low = mass
    at = masses_ptr + program * B + row
    tl.store(at, window.to(tl.int32, bitcast=True).to(tl.int64), mask=there)
    tl.store(at + programs * B, high, mask=there)
    tl.store(at + 2 * programs * B, low, mask=there)


@triton.jit
def mass_of_programs(masses_ptr, programs, program, row, B):
    """The masses of rows, [R] each, from those that all programs left.

    Args:
        masses_ptr: int64 [3, programs, B]: bits of the window, high, low.
        program: int32 [1, W], 0 .. W - 1: so many programs' are added up at once.
        row: int32 [R].
    """
    mass = no_mass((row * 0).to(tl.float32)[:, None] + (program * 0).to(tl.float32))
    for first in range(0, programs, program.shape[1]):
        at = masses_ptr + (first + program) * B + row[:, None]
        there = (first + program < programs) & (row < B)[:, None]
        bits = tl.load(at, mask=there, other=0, cache_modifier=".cg")
        window = tl.where(there, bits.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
        high = tl.load(at + programs * B, mask=there, other=0, cache_modifier=".cg")
        low = tl.load(at + 2 * programs * B, mask=there, other=0, cache_modifier=".cg")
        mass = add_masses(mass, (window, high, low))
    return mass_of_rows(mass)


@triton.jit
def _binary_log(mass):
    """(k, l) with 2^window 2^k exp(l) the mass, l in [0, log 2); of no use where it is 0."""
    _, high, low = mass
    bits = (high.to(tl.float32) + low.to(tl.float32) * 2.0**-32).to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return ((bits >> 23) - 127).to(tl.float32), log(fraction)


@triton.jit
def log_of_mass(mass):
    """log Z of a row."""
    k, rest = _binary_log(mass)
    return tl.fma(mass[0] + k, LN_2, rest)


@triton.jit
def log_probability(logit, mass, inverse_temperature):
    """logit / T - log Z, at most 0: within 1e-6 of 1 + its size, however large both terms are."""
    n, f = binary_exponent(logit, inverse_temperature)
    k, rest = _binary_log(mass)
    found = tl.fma(((n - mass[0]) - k) + f, LN_2, -rest)
    return tl.where(logit == float("-inf"), logit, tl.minimum(found, 0.0))
