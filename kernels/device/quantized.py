"""Device code of a quantized head: the scales of tokens, and what they make of a sum."""

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
"""Whether kernels may have instructions of NVIDIA GPUs: not in the interpreter."""


@triton.jit
def converted(w, dtype: tl.constexpr):
    """Numbers of int8 or e4m3 in bf16, fp16 or fp32, which have all of them; NaN stays NaN."""
    if w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # The upper half of the fp32 number. What Triton emits for Hopper converts one at a time.
        bits = w.to(tl.float32).to(tl.int32, bitcast=True)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif PTX and w.dtype == tl.int8 and dtype == tl.bfloat16:
        # Two at a time. 128 + the number, as bits of bf16, is as many times 2^-133, its smallest;
        # that times 2^127 and less 2 is the number over 64. Triton's own takes more instructions.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 bytes, large, less, zero;
                mov.b32 large, 0x7f007f00;
                mov.b32 less, 0xc000c000;
                cvt.u32.u16 bytes, $1;
                prmt.b32 bytes, bytes, 0, 0x4140;
                xor.b32 bytes, bytes, 0x00800080;
                fma.rn.bf16x2 bytes, bytes, large, less;
                mov.b32 large, 0x42804280;
                mov.b32 zero, 0x80008000;
                fma.rn.bf16x2 $0, bytes, large, zero;
            }
            """,
            "=r,h",
            [w],
            tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    elif PTX and w.dtype == tl.int8 and dtype == tl.float16:
        # Two at a time: 1024 + (128 + the number), less 1152.
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b32 bytes, less;
                mov.b32 less, 0xe480e480;
                cvt.u32.u16 bytes, $1;
                prmt.b32 bytes, bytes, 0x64, 0x4140;
                xor.b32 bytes, bytes, 0x00800080;
                add.rn.f16x2 $0, bytes, less;
            }
            """,
            "=r,h",
            [w],
            tl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return w.to(dtype)


@triton.jit
def finished(acc):
    """acc itself, once the product that it is of has run.

    Numbers that were converted in registers are read there while the product runs. Triton overlaps
    it with the next conversion, which may write the same registers: fp8 at B = 256 on an H200 drew
    wrong tokens. It waits for a sum that something else needs.
    """
    if PTX:
        return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)
    else:
        return acc


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
