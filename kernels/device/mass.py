"""Sums of exp(logit / T) that do not depend on the order of summation.

The 32 tokens of a group (noise.group) are summed in floating point in the order of their ids, which
gives the same bits everywhere. Sums of groups are exact integers. So log Z, and each
log-probability, is a function of a row's logits alone: all tiles, programs, kernels and ranks
compute the same bits.

The mass of a set of groups is a tuple (window, high, low): high + low 2^-32 in units of 2^window.

    window  fp32, a multiple of 32: the window of the largest group. The window of a group is its
            binary exponent, rounded down.
    high    int64, the sum of the integer parts of the groups of this window
    low     int64, the sum of their next 32 bits, and of the integer parts one window below

Lower bits are dropped: less than 2^-32 of the sum for each group. Digits are never carried from low
to high, so the order in which groups are added does not matter.

For the entropy a mass has two more numbers, its *moment*: the sum over tokens of 2^x (window + 32 -
x), where 2^x = exp(logit / T). Its digits are like those of the mass, and exact in the same way:
one window up, the moment grows by 32 masses, which are integers.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import LOG2_E, log
from fsbench.kernels.noise.group import group_sums, members

LN_2 = tl.constexpr(0.6931471805599453)
WINDOW = tl.constexpr(32.0)
FURTHEST = tl.constexpr(2.0**128 - 2.0**104)
"""The largest fp32 number, to which binary exponents of exp(logit / T) are clamped."""
FAR_BELOW = tl.constexpr(-1e30)
"""Lowest exponent that is multiplied: its exp2 is 0, and so is the product."""


@triton.jit
def no_mass(zero, MOMENT: tl.constexpr = False):
    """Return the empty mass in the shape of `zero`, fp32 zeros. MOMENT: with a moment."""
    mass = (zero - float("inf"), zero.to(tl.int64), zero.to(tl.int64))
    if MOMENT:
        mass += (zero.to(tl.int64), zero.to(tl.int64))  # type: ignore[assignment]
    return mass


@triton.jit
def binary_exponent(y, inverse_temperature):
    """Return (n, f) with exp(y / T) = 2^(n + f): n a whole number in fp32, f in [-0.5, 1.5]."""
    c = inverse_temperature * LOG2_E
    # The clamp also keeps the assembler from fusing the product with a sum in some kernels only.
    e = tl.minimum(tl.maximum(c * y, -FURTHEST), FURTHEST)
    lost = tl.where(tl.abs(e) < 16777216.0, tl.fma(c, y, -e), 0.0)
    n = tl.floor(e)
    return n, (e - n) + lost


@triton.jit
def group_moments(y, m, inverse_temperature):
    """Sum 2^x x over the members (32 tensors [R, G]) in order; 2^x = exp((y - m) / T)."""
    finite = tl.where(m == float("-inf"), 0.0, m)
    c = inverse_temperature * LOG2_E
    x = c * (y[0] - finite)
    total = tl.exp2(x) * tl.maximum(x, FAR_BELOW)
    for i in tl.static_range(1, 32):
        x = c * (y[i] - finite)
        total = tl.fma(tl.exp2(x), tl.maximum(x, FAR_BELOW), total)
    return total


@triton.jit
def mass_of_groups(m, s, inverse_temperature, moments=None):
    """Return the mass of each group, s exp(m / T).

    Args:
        m, s: the largest member and the last sum, as `group_sums` returns them.
        moments: the result of `group_moments`, or None for a mass without a moment.
    """
    n, f = binary_exponent(m, inverse_temperature)
    bits = (s * tl.exp2(f)).to(tl.int32, bitcast=True)
    # Products with powers of two are exact, fused or not.
    window = WINDOW * tl.floor((n + ((bits >> 23) - 127).to(tl.float32)) * (1.0 / WINDOW))
    shift = (n - window).to(tl.int32)
    scaled = (bits + (shift << 23)).to(tl.float32, bitcast=True)
    high, low = _integers(scaled)
    mass = (window, high, low)
    if moments is not None:
        # s (32 - shift - f) - moments: s (32 - shift) is a product of integers, the rest is small.
        unit = ((shift + 127) << 23).to(tl.float32, bitcast=True)
        more_high, more_low = _integers(tl.fma(s, -f, -moments) * tl.exp2(f) * unit)
        times = (32 - shift).to(tl.int64)
        mass += (high * times + more_high, low * times + more_low)  # type: ignore[assignment]
    return mass


@triton.jit
def _integers(x):
    """Return x as integers (high, low) with x = high + low 2^-32."""
    high = tl.floor(x)
    return high.to(tl.int64), ((x - high) * 4294967296.0).to(tl.int64)


@triton.jit
def add_masses(a, b):
    """Return the mass of the union of two sets of groups; bitwise associative and commutative."""
    window = tl.maximum(a[0], b[0])
    digits_a = _digits(a, window)
    digits_b = _digits(b, window)
    mass = (window,)
    for i in tl.static_range(len(digits_a)):
        mass += (digits_a[i] + digits_b[i],)  # type: ignore[assignment]
    return mass


@triton.jit
def _digits(mass, window):
    """Return the digits of a mass in a window at or above the window of the mass."""
    below = window - mass[0]
    low = tl.where(below == 0.0, mass[2], tl.where(below == WINDOW, mass[1], 0))
    digits = (tl.where(below == 0.0, mass[1], 0), low)
    if len(mass) > 3:
        raised = mass[3] + 32 * mass[1]
        low = tl.where(below == 0.0, mass[4], tl.where(below == WINDOW, raised, 0))
        digits += (tl.where(below == 0.0, mass[3], 0), low)  # type: ignore[assignment]
    return digits


@triton.jit
def add_tile(logits, inverse_temperature, mass):
    """Add a tile [R, WIDTH] to the mass [R, WIDTH / 32] of its columns' groups.

    Group noise needs the same sums, and the compiler computes them once.
    """
    y = members(logits)
    m, sums = group_sums(y, inverse_temperature)
    moments = None
    if len(mass) > 3:
        moments = group_moments(y, m, inverse_temperature)
    return add_masses(mass, mass_of_groups(m, sums[31], inverse_temperature, moments))


@triton.jit
def mass_of_rows(mass):
    """Add up the masses [R, W] of parts of rows and return the masses [R] of the rows."""
    window = tl.max(mass[0], axis=1)
    digits = _digits(mass, window[:, None])
    of_rows = (window,)
    for i in tl.static_range(len(digits)):
        of_rows += (tl.sum(digits[i], axis=1),)  # type: ignore[assignment]
    return of_rows


@triton.jit
def store_mass(masses_ptr, mass, programs, program, row, B, mask):
    """Store the masses of rows, [R], for `mass_of_programs`."""
    pointers = masses_ptr + program * B + row
    tl.store(pointers, mass[0].to(tl.int32, bitcast=True).to(tl.int64), mask=mask)
    for i in tl.static_range(1, len(mass)):
        tl.store(pointers + i * programs * B, mass[i], mask=mask)


@triton.jit
def mass_of_programs(masses_ptr, programs, program, row, B, MOMENT: tl.constexpr = False):
    """Add up the masses that all programs have stored, and return the masses of rows, [R].

    Args:
        masses_ptr: int64 [3, programs, B]: bits of the window, high, low; [5, ...] with MOMENT.
        program: int32 [1, W], 0 .. W - 1; W is the number of programs that are added at once.
        row: int32 [R].
    """
    return mass_of_slots(masses_ptr, programs, 0, programs, program, row, B, MOMENT)


@triton.jit
def mass_of_slots(masses_ptr, programs, first, end, program, row, B, MOMENT: tl.constexpr = False):
    """Add up the masses of the programs from `first` up to, not including, `end`.

    Args and result: see `mass_of_programs`.
    """
    mass = no_mass((row * 0).to(tl.float32), MOMENT)
    for start in range(first, end, program.shape[1]):
        pointers = masses_ptr + (start + program) * B + row[:, None]
        mask = (start + program < end) & (row < B)[:, None]
        # The loads of a step come first, so that they are under way at the same time.
        bits = tl.load(pointers, mask=mask, other=0, cache_modifier=".cg")
        digits = ()
        for i in tl.static_range(1, len(mass)):
            digit = tl.load(pointers + i * programs * B, mask=mask, other=0, cache_modifier=".cg")
            digits += (digit,)  # type: ignore[assignment]
        window = tl.where(mask, bits.to(tl.int32).to(tl.float32, bitcast=True), float("-inf"))
        mass = add_masses(mass, mass_of_rows((window,) + digits))  # noqa: RUF005
    return mass


@triton.jit
def _number(high, low):
    return high.to(tl.float32) + low.to(tl.float32) * 2.0**-32


@triton.jit
def _binary_log(mass):
    """Return (k, l): the mass is 2^(window + k) exp(l), l in [0, log 2). Undefined for mass 0."""
    bits = _number(mass[1], mass[2]).to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
    return ((bits >> 23) - 127).to(tl.float32), log(fraction)


@triton.jit
def log_of_mass(mass):
    """Return log Z of a row."""
    k, log_fraction = _binary_log(mass)
    return tl.fma(mass[0] + k, LN_2, log_fraction)


@triton.jit
def log_probability(logit, mass, inverse_temperature):
    """Return logit / T - log Z, at most 0; the error is below 1e-6 (1 + |logit / T - log Z|)."""
    n, f = binary_exponent(logit, inverse_temperature)
    k, log_fraction = _binary_log(mass)
    logprob = tl.fma(((n - mass[0]) - k) + f, LN_2, -log_fraction)
    return tl.where(logit == float("-inf"), logit, tl.minimum(logprob, 0.0))


@triton.jit
def entropy_of_mass(mass):
    """Return log Z - sum p logit / T of a row, at least 0, from its mass and moment."""
    k, log_fraction = _binary_log(mass)
    # log2 Z is window + k + rest: whole numbers cancel before anything is rounded.
    times = k.to(tl.int64) - 32
    high = mass[3] + times * mass[1]
    low = mass[4] + times * mass[2]
    mean = _number(high + (low >> 32), low & 0xFFFFFFFF) / _number(mass[1], mass[2])
    return tl.maximum(tl.fma(mean, LN_2, log_fraction), 0.0)
