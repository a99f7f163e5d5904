"""Device code of a quantised head: the scales of tokens, and what they make of a sum."""

import triton
import triton.language as tl


@triton.jit
def scales_of_tokens(scale_ptr, tokens, V, PER_ROW: tl.constexpr):
    """fp32, of the shape of tokens: their scales; NaN for one that is negative or not finite.

    Args:
        scale_ptr: fp32 [V], or [1] for all of them.
        tokens: int32; those from V on are none.
        PER_ROW: whether there is one of each token.
    """
    there = tokens < V
    scale = tl.load(scale_ptr + (tokens if PER_ROW else tokens * 0), mask=there, other=0.0)
    return tl.where((scale >= 0) & (scale < float("inf")), scale, float("nan"))


@triton.jit
def scaled(y, scale):
    """y scale, rounded once."""
    # A product that enters a sum later would be fused by the assembler in one kernel and not in
    # another. The addend is 0, or NaN as the scale is, which the compiler does not know.
    return tl.fma(y, scale, scale * 0.0)
