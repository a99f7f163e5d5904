"""Device code for quantized heads: conversion of one-byte weights, and the scales of tokens."""

import torch
import triton
import triton.language as tl

PTX = tl.constexpr(torch.version.hip is None and not triton.knobs.runtime.interpret)
"""Whether kernels may use inline PTX: on NVIDIA GPUs, but not in the interpreter."""


@triton.jit
def converted(w, dtype: tl.constexpr):
    """Convert int8 or e4m3 to bf16, fp16 or fp32 without rounding; NaN stays NaN."""
    if w.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        # The upper half of the fp32 number. Triton's own code for Hopper converts one at a time.
        bits = w.to(tl.float32).to(tl.int32, bitcast=True)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    elif PTX and w.dtype == tl.int8 and dtype == tl.bfloat16:
        # Two at a time. The bits of 128 + w, read as bf16, are (128 + w) 2^-133. Times 2^127, minus
        # 2, this is w / 64. Triton's own conversion takes more instructions.
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
        # Two at a time: 1024 + (128 + w), minus 1152.
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
    """Return acc, and make the compiler wait for the product that computes it.

    The product reads converted weights from registers while it runs. Triton overlaps it with the
    next conversion, which may write the same registers: fp8 at B = 256 on an H200 drew wrong
    tokens. A use of acc makes Triton wait.
    """
    if PTX:
        return tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, is_pure=True, pack=1)
    else:
        return acc


@triton.jit
def scales_of_tokens(scale_ptr, tokens, V, PER_ROW: tl.constexpr):
    """Load the scales of tokens, fp32; NaN for a scale that is negative or not finite.

    Args:
        scale_ptr: fp32 [V], or [1] for all tokens.
        tokens: int32 of any shape; from V on they are idle.
        PER_ROW: whether each token has a scale.
    """
    in_vocab = tokens < V
    scale = tl.load(scale_ptr + (tokens if PER_ROW else tokens * 0), mask=in_vocab, other=0.0)
    return tl.where((scale >= 0) & (scale < float("inf")), scale, float("nan"))


@triton.jit
def scaled(y, scale):
    """Return y scale, rounded once."""
    # The assembler would fuse a product with a later sum in one kernel and not in another. The
    # addend is 0 (or NaN, if the scale is), which the compiler does not know.
    return tl.fma(y, scale, scale * 0.0)
