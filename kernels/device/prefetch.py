"""Asking for memory ahead of its use."""

import triton
import triton.language as tl


@triton.jit
def prefetch(at):
    """Bring the lines at pointers `at` into the L2; nothing waits for them. NVIDIA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
    )


@triton.jit
def touch(at, NVIDIA: tl.constexpr):
    """Bring what pointers `at` point to into the nearest cache; nothing waits for it."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "ld.global.ca.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
        )
