"""Packed candidates: (score, token) as one int64 whose order is that of the draw."""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**63))
"""Key of no candidate at all; every slot of a workspace rests at it between calls."""


LOWEST = tl.constexpr(-2139095040)
"""`ordered` of the lowest finite fp32."""


@triton.jit
def flipped(bits):
    """Bits of fp32 numbers -> int32 in the order of these, and back: its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def ordered(y):
    """fp32 -> int32 in the same order; -0 as +0. Not for NaN."""
    return flipped((y + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def value_of(order):
    """The fp32 of `ordered`."""
    return flipped(order).to(tl.float32, bitcast=True)


@triton.jit
def ordered_key(score, token):
    """Pack (score, token) into an int64 whose order is: larger score first, then lower token id.

    A NaN score must have been replaced by +inf before. token is a nonnegative int32.
    """
    return (ordered(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def take_keys(keys_ptr, at, there):
    """The keys at `at`, which are put back to rest."""
    lowest = tl.full(at.shape, LOWEST_KEY, tl.int64)
    return tl.atomic_xchg(keys_ptr + at, lowest, mask=there, sem="relaxed")


@triton.jit
def token_of_key(key):
    """The token of a packed candidate, or -1 if its row has no valid draw.

    A row is invalid if its best score is +inf (a NaN or +inf logit) or -inf (no finite logit).
    """
    order = (key >> 32).to(tl.int32)
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    finite = (order < 0x7F800000) & (order > -0x7F800001)
    return tl.where(finite, token, -1)
