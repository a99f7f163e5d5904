"""Arithmetic in plain Triton that gives the same bits on all backends, and register reshapes."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
"""exp(x) = exp2(LOG2_E x)."""


@triton.jit
def halves(x):
    """Split [R, W] into its left and right [R, W / 2]. No data moves."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def pieces(x, WIDTH: tl.constexpr):
    """Split [R, W] into a tuple of parts [R, WIDTH], from left to right. No data moves."""
    if x.shape[1] == WIDTH:
        return (x,)
    else:
        low, high = halves(x)
        return pieces(low, WIDTH) + pieces(high, WIDTH)


@triton.jit
def log(x):
    """Return the natural logarithm of a positive normal fp32 x, within 2 ulp.

    x = 2^k m with m in [2/3, 4/3); log m = f + f^2 P(f), f = m - 1 (exact), P a degree-7 minimax
    polynomial with relative error 2^-27 on [-1/3, 1/3].
    """
    bits = x.to(tl.int32, bitcast=True)
    k = (bits - 0x3F2AAAAB) >> 23
    f = (bits - (k << 23)).to(tl.float32, bitcast=True) - 1.0
    p = 0.13521721959114075 * f - 0.15410803258419037
    p = p * f + 0.14143916964530945
    p = p * f - 0.16416624188423157
    p = p * f + 0.1999768763780594
    p = p * f - 0.25007352232933044
    p = p * f + 0.33333563804626465
    p = p * f - 0.4999995529651642
    log_m = p * (f * f) + f
    # int to float by an exponent trick: conversions run at a quarter of the rate of additions.
    k_float = (k + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
    return k_float * 0.6931471805599453 + log_m


@triton.jit
def nan_max(a, b):
    """Return the larger of two numbers, NaN if either is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
