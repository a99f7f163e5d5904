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
def prefetch_rows(matrix_ptr, row0, lines, column, rows, D, HEIGHT: tl.constexpr):
    """Ask for lines of HEIGHT rows of a matrix of bytes [rows, D], from row0 on.

    lines: int32 [N], their numbers, row by row of a column of lines. column: int32 [N], where they
    begin in their rows.
    """
    row = tl.minimum(row0 + lines % HEIGHT, rows - 1)
    prefetch(matrix_ptr + row.to(tl.int64) * D + column)


@triton.jit
def touch(at, NVIDIA: tl.constexpr):
    """Bring what pointers `at` point to into the nearest cache; nothing waits for it."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "ld.global.ca.b32 $0, [$1];", "=r,l", [at.to(tl.int64)], tl.int32, False, 1
        )
