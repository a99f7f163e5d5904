"""Packed candidates: (score, token) as an int64 key; the largest key wins the draw."""

import triton
import triton.language as tl

LOWEST_KEY = tl.constexpr(-(2**63))
"""Key without a candidate, and the value of all keys of a workspace between calls."""
LOWEST = tl.constexpr(-2139095040)
"""`ordered` of the lowest finite fp32."""


@triton.jit
def flipped(bits):
    """Map the bits of fp32 numbers to int32 in the same order; an involution."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def ordered(y):
    """Map fp32 to int32 in the same order, -0 like +0. Undefined for NaN."""
    return flipped((y + 0.0).to(tl.int32, bitcast=True))


@triton.jit
def value_of(order):
    """Return the fp32 number of its `ordered` int32."""
    return flipped(order).to(tl.float32, bitcast=True)


@triton.jit
def ordered_key(score, token):
    """Pack (score, token) into an int64 that is larger for a larger score, then a lower token.

    The caller replaces a NaN score by +inf. token is a nonnegative int32.
    """
    return (ordered(score).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def take_keys(keys_ptr, offsets, mask):
    """Load the keys at `offsets` and reset them to LOWEST_KEY."""
    lowest = tl.full(offsets.shape, LOWEST_KEY, tl.int64)
    return tl.atomic_xchg(keys_ptr + offsets, lowest, mask=mask, sem="relaxed")


@triton.jit
def token_of_key(key):
    """Return the token of a key, or -1 if the row has no valid draw.

    A row is invalid if its best score is +inf (a NaN or +inf logit) or -inf (no finite logit).
    """
    order = (key >> 32).to(tl.int32)
    token = 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)
    finite = (order < 0x7F800000) & (order > -0x7F800001)
    return tl.where(finite, token, -1)
