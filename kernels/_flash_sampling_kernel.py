"""Device code of FlashSampling: Algorithm 1 of the paper in portable Triton, in one launch.

A persistent program owns one block of batch rows and walks over vocabulary tiles. Per tile it
accumulates logits in fp32 on chip, adds token noise, and keeps one packed candidate per row (the
running maximum). At the end each program merges its candidates into `keys` by an atomic maximum;
the last program to arrive decodes the tokens and resets the workspace for the next call.
"""

import triton
import triton.language as tl

from fsbench.kernels._helper import LOWEST_KEY, best_keys, token_of_key


@triton.jit
def _load_tile(matrix, row0, col0, ROWS: tl.constexpr, COLS: tl.constexpr, n_rows, n_cols,
               USE_TMA: tl.constexpr):  # fmt: skip
    """matrix[row0 : row0 + ROWS, col0 : col0 + COLS], zero beyond its [n_rows, n_cols]."""
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
def _column(step, tile_v, steps_d, ROTATE: tl.constexpr):
    """The column block that step number `step` of a tile reads.

    With ROTATE each tile starts at another block. Otherwise all programs read the same few lines
    of hidden at once, and at small B these can sit in one slice of the L2: seen at B = 1, 305
    instead of 281 us, depending on the address of hidden. It follows the tile, not the program, so
    logits do not depend on the number of programs.
    """
    if ROTATE:
        return (step + tile_v) % steps_d
    else:
        return step


@triton.jit
def _best_of_tile(logits, v0, row, seed, offset, temperature, best):
    """Merge a tile [R, WIDTH] into best [R, SLICE // 4], SLICE columns after SLICE columns.

    Slicing bounds the registers that the noise needs: a whole tile's at once would spill.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    if 4 * best.shape[1] == WIDTH:
        return best_keys(logits, v0, row, seed, offset, temperature, best)
    else:
        low, high = logits.reshape(R, 2, WIDTH // 2).permute(0, 2, 1).split()
        best = _best_of_tile(low, v0, row, seed, offset, temperature, best)
        return _best_of_tile(high, v0 + WIDTH // 2, row, seed, offset, temperature, best)


@triton.jit(do_not_specialize=["B", "V"])
def flash_sampling_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer
    weight,  # [V, D] descriptor (USE_TMA) or pointer
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32
    keys_ptr,  # [>= B] int64, LOWEST_KEY between calls
    arrivals_ptr,  # [1] int32, 0 between calls
    tokens_ptr,  # [B] int64, out
    valid_ptr,  # [B] bool, out
    B,
    V,
    D,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICE: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
    ROTATE: tl.constexpr,
):
    num_tiles_b = tl.cdiv(B, BLOCK_B)
    pid_b = tl.program_id(0) % num_tiles_b
    pid_v = tl.program_id(0) // num_tiles_b
    b0 = pid_b * BLOCK_B
    rows = b0 + tl.arange(0, BLOCK_B)
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)

    best = tl.full((BLOCK_B, SLICE // 4), LOWEST_KEY, tl.int64)
    steps_d = tl.cdiv(D, BLOCK_D)
    stride = tl.num_programs(0) // num_tiles_b
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), stride, flatten=FLATTEN):
        v0 = tile_v * BLOCK_V
        acc = tl.zeros((BLOCK_V, BLOCK_B) if V_ON_M else (BLOCK_B, BLOCK_V), tl.float32)
        for step in range(steps_d):
            d0 = _column(step, tile_v, steps_d, ROTATE) * BLOCK_D
            w = _load_tile(weight, v0, d0, BLOCK_V, BLOCK_D, V, D, USE_TMA)
            h = _load_tile(hidden, b0, d0, BLOCK_B, BLOCK_D, B, D, USE_TMA)
            if V_ON_M:
                acc = tl.dot(w, h.T, acc, input_precision="ieee")
            else:
                acc = tl.dot(h, w.T, acc, input_precision="ieee")
        logits = acc.T if V_ON_M else acc
        offs_v = v0 + tl.arange(0, BLOCK_V)
        logits = tl.where((offs_v < V)[None, :], logits, float("-inf"))
        best = _best_of_tile(logits, v0, rows[:, None], seed, offset, temperature, best)

    tl.atomic_max(keys_ptr + rows, tl.max(best, axis=1), mask=rows < B)
    # All of this program's candidates are merged before its arrival is counted.
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr, 1) == tl.num_programs(0) - 1:
        for first in range(0, B, BLOCK_B):
            out = first + tl.arange(0, BLOCK_B)
            lowest = tl.full((BLOCK_B,), LOWEST_KEY, tl.int64)
            token = token_of_key(tl.atomic_xchg(keys_ptr + out, lowest, mask=out < B))
            tl.store(tokens_ptr + out, token.to(tl.int64), mask=out < B)
            tl.store(valid_ptr + out, token >= 0, mask=out < B)
        tl.atomic_xchg(arrivals_ptr, 0)
