"""The matmul in portable Triton: tiles of logits, summed in fp32 over the columns of hidden."""

import triton
import triton.language as tl

from fsbench.kernels.device.quantized import converted, finished

ROTATION = tl.constexpr(256)
"""The number of tokens whose sums start at the same block of columns, and the columns of a block.

Tile sizes divide it."""


@triton.jit
def program_share(B, BLOCK_B: tl.constexpr):
    """Return (block of rows, the program's index in that block, programs of the block)."""
    num_tiles_b = tl.cdiv(B, BLOCK_B)
    pid = tl.program_id(0)
    return pid % num_tiles_b, pid // num_tiles_b, tl.num_programs(0) // num_tiles_b


@triton.jit
def load_tile(matrix, row0, col0, ROWS: tl.constexpr, COLS: tl.constexpr, n_rows, n_cols,
               USE_TMA: tl.constexpr):  # fmt: skip
    """Load matrix[row0 : row0 + ROWS, col0 : col0 + COLS], zero beyond [n_rows, n_cols]."""
    if USE_TMA:
        return matrix.load([row0, col0])
    else:
        rows = row0 + tl.arange(0, ROWS)
        cols = col0 + tl.arange(0, COLS)
        pointers = matrix + rows.to(tl.int64)[:, None] * n_cols + cols[None, :]
        return tl.load(
            pointers, mask=(rows < n_rows)[:, None] & (cols < n_cols)[None, :], other=0.0
        )


@triton.jit
def own_tokens(first_token, num_tokens, V):
    """Return (first token, number of tokens) of a shard; without one (None) all V tokens."""
    if first_token is None:
        return 0, V
    else:
        return first_token, num_tokens


@triton.jit
def first_column(v0, D):
    """Return the column at which the sum starts for tokens from v0 on; see `tile_logits`."""
    return (v0 // ROTATION) % tl.cdiv(D, ROTATION) * ROTATION


@triton.jit
def tile_logits(hidden, weight, b0, row0, v0, B, num_rows, D, BLOCK_B: tl.constexpr,
                BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr, V_ON_M: tl.constexpr,
                USE_TMA: tl.constexpr):  # fmt: skip
    """Return hidden[b0 : b0 + BLOCK_B] @ weight[row0 : row0 + BLOCK_V].T, fp32 [BLOCK_B, BLOCK_V].

    Row row0 of weight [num_rows, D] is token v0. Weights of one byte are converted on chip to
    hidden's dtype, which represents all of them.

    Every 256 tokens start their sum at another block of 256 columns. If all sums started at column
    0, all programs would read the same few lines of hidden at once. At small B these lines can sit
    in one slice of the L2: at B = 1 that took 305 instead of 281 us, depending on the address of
    hidden. The start depends on the token alone, so tiles of any shape sum in the same order.
    """
    steps = tl.cdiv(D, BLOCK_D)
    first = first_column(v0, D) // BLOCK_D
    acc = tl.zeros((BLOCK_V, BLOCK_B) if V_ON_M else (BLOCK_B, BLOCK_V), tl.float32)
    for step in range(steps):
        block = first + step
        d0 = tl.where(block < steps, block, block - steps) * BLOCK_D
        w = load_tile(weight, row0, d0, BLOCK_V, BLOCK_D, num_rows, D, USE_TMA)
        h = load_tile(hidden, b0, d0, BLOCK_B, BLOCK_D, B, D, USE_TMA)
        if w.dtype != h.dtype:
            w = converted(w, h.dtype)
        if V_ON_M:
            acc = tl.dot(w, h.T, acc, input_precision="ieee")
        else:
            acc = tl.dot(h, w.T, acc, input_precision="ieee")
        if weight.dtype != hidden.dtype:
            acc = finished(acc)
    return acc.T if V_ON_M else acc


@triton.jit
def prefetch(pointers):
    """Bring the lines at `pointers` into the L2 without waiting for them. NVIDIA only."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        tl.int32,
        False,
        1,
    )


@triton.jit
def touch(pointers, NVIDIA: tl.constexpr):
    """Bring what `pointers` point to into the nearest cache without waiting for it."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "ld.global.ca.b32 $0, [$1];", "=r,l", [pointers.to(tl.int64)], tl.int32, False, 1
        )
