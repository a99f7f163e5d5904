"""Device code of a quantised head: the scales of tokens, and what they make of a sum."""

import triton
import triton.language as tl


@triton.jit
def converted(w, dtype: tl.constexpr):
    """Numbers of int8 or e4m3 in bf16, fp16 or fp32, which have all of them; NaN stays NaN."""
    if w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # The upper half of the fp32 number. What Triton emits for Hopper converts one at a time.
        bits = w.to(tl.float32).to(tl.int32, bitcast=True)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return w.to(dtype)


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
