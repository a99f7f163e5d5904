"""The matmul of the Hopper kernel in Gluon: the tiles of a program, their loads and products.

A ring buffer in shared memory connects the loading warp and the computing warpgroups: (tiles of
weight, tiles of hidden, (tiles of the extra rows of a mixed block,) or (), barriers of loaded
stages, barriers of free stages). The portable version, `device.mainloop`, has the code that both
share.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fsbench.kernels.configs import hopper
from fsbench.kernels.device.hopper_epilogue import ROWS
from fsbench.kernels.device.mainloop import first_column

# Triton 3.6 has one of the two names, 3.9 the other.
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_memory = gl.shared_memory_descriptor
reinterpreted = getattr(_memory, "reinterpret", None) or _memory._reinterpret

CHUNK = gl.constexpr(hopper.CHUNK)
PAIR = gl.constexpr(hopper.PAIR)
"""Rows of a pair of blocks, which share the rows of their third warpgroup."""
EXTRA_BOX = gl.constexpr(hopper.EXTRA_BOX)
"""Rows of the box whose last rows are the extra rows of a mixed block."""


@gluon.constexpr_function
def accumulator_layout(N, BITS):
    """Return the layout of the sums of an instruction with N columns and BITS-bit operands."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 256 // BITS]
    )


@gluon.jit
def allocated_ring(
    weight, hidden, WARPGROUPS: gl.constexpr, EXTRA_ROWS: gl.constexpr, BLOCK_V: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Allocate an empty ring buffer in shared memory. weight, hidden: descriptors."""
    BOX: gl.constexpr = weight.block_type.shape[1]
    CHUNKS: gl.constexpr = BLOCK_D // BOX
    weight_ring = gl.allocate_shared_memory(
        weight.dtype, [STAGES * CHUNKS, BLOCK_V, BOX], weight.layout
    )
    hidden_ring = gl.allocate_shared_memory(
        hidden.dtype, [STAGES * CHUNKS * WARPGROUPS, ROWS, BOX], hidden.layout
    )
    shape: gl.constexpr = [STAGES * CHUNKS, EXTRA_BOX, BOX]
    extra_ring = (
        (gl.allocate_shared_memory(hidden.dtype, shape, hidden.layout),) if EXTRA_ROWS > 0 else ()
    )
    loaded, free = barriers(WARPGROUPS, STAGES)
    return weight_ring, hidden_ring, extra_ring, loaded, free


@gluon.jit
def barriers(WARPGROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Return the barriers of loaded and of free stages of a ring that WARPGROUPS read."""
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(free.index(i), count=WARPGROUPS)
    fence_async_shared()
    return loaded, free


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the next stage and the phase of its barriers."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def first_block_row(pid_b, BLOCK_B: gl.constexpr, PAIRED: gl.constexpr):
    """Return the first row of a block. The second of a pair begins two warpgroups further."""
    if PAIRED:
        return pid_b // 2 * PAIR + pid_b % 2 * (2 * ROWS)
    else:
        return pid_b * BLOCK_B


@gluon.jit
def first_unclamped_row(b0, WARPGROUP: gl.constexpr, PAIRED: gl.constexpr):
    """Return the first row of a warpgroup. Both blocks of a pair share the third warpgroup's."""
    if PAIRED and WARPGROUP == 2:
        return b0 // PAIR * PAIR + 4 * ROWS
    else:
        return b0 + WARPGROUP * ROWS


@gluon.jit
def first_row(
    b0, B, WARPGROUP: gl.constexpr, PAIRED: gl.constexpr, number: gl.constexpr, BOX: gl.constexpr
):
    """Return the first row of a box of a warpgroup; a box that would end beyond B starts earlier.

    TMA takes longer for rows outside of the matrix than for rows inside: a batch of 40 in a box of
    64 took 10 % longer than a batch of 48 (H200, 2026-11-23).
    """
    first = first_unclamped_row(b0, WARPGROUP, PAIRED)
    return gl.minimum(first + number * BOX, gl.maximum(B - BOX, 0))


@gluon.jit
def rows_of_warpgroup(
    b0, B, WARPGROUP: gl.constexpr, PAIRED: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Return the instruction's rows [ROWS], and which are below B and no repetition."""
    index = gl.arange(0, ROWS, LAYOUT)
    first = first_unclamped_row(b0, WARPGROUP, PAIRED)
    row = first_row(b0, B, WARPGROUP, PAIRED, 0, BOX) + index
    is_first = row >= first
    if BOXES == 2:
        # Rows behind the second box have not been loaded; they get the invalid row B.
        second = first_row(b0, B, WARPGROUP, PAIRED, 1, BOX) + index - BOX
        is_first = gl.where(index < BOX, is_first, second >= first + BOX)
        row = gl.where(index < BOX, row, gl.where(index < 2 * BOX, second, B))
    return row, (row < B) & is_first


@gluon.jit
def first_of_extra_rows(b0, B, EXTRA_ROWS: gl.constexpr):
    """Return the first row of the box whose last EXTRA_ROWS are the extra rows of a mixed block."""
    return gl.minimum(b0 + 2 * ROWS + EXTRA_ROWS - EXTRA_BOX, gl.maximum(B - EXTRA_BOX, 0))


@gluon.jit
def schedule(num_tokens, programs_v, BLOCK_V: gl.constexpr):
    """Return (rounds, first tail block): rounds of one tile for each program, then a tail.

    If a tile has two blocks of 128 tokens and the last round has at most one block for each
    program, these blocks are the tail, and program p takes block first + p.
    """
    blocks = gl.cdiv(num_tokens, 128)
    if BLOCK_V == 128:
        return gl.cdiv(blocks, programs_v), blocks
    else:
        rounds = blocks // (2 * programs_v)
        remaining = blocks - rounds * 2 * programs_v
        rounds = gl.where(remaining > programs_v, rounds + 1, rounds)
        return rounds, rounds * 2 * programs_v


@gluon.jit
def first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr):
    """Return the first row of weight of a program's tile in round r."""
    if CONTIGUOUS:
        return (pid_v * rounds + r) * BLOCK_V
    else:
        return (r * programs_v + pid_v) * BLOCK_V


@gluon.jit
def program_of(row, num_tokens, programs_v, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr):
    """Return the program that computes the logits of a row of weight."""
    rounds, tail = schedule(num_tokens, programs_v, BLOCK_V)
    tile = row // BLOCK_V
    program = tile // gl.maximum(rounds, 1) if CONTIGUOUS else tile % programs_v
    return gl.where(row < tail * 128, program, row // 128 - tail)


@gluon.jit
def load_columns(
    weight, hidden, ring, stage, phase, row0, d0, columns, b0, B, D,
    WARPGROUPS: gl.constexpr, PAIRED: gl.constexpr, EXTRA_ROWS: gl.constexpr, BOXES: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands of a tile of WIDTH tokens into the ring, as stages become free.

    Args:
        row0: the tile's first row of weight.
        d0: the first column; column 0 follows column D - 1. columns: the number of columns.
    """
    weight_ring, hidden_ring, extra_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // CHUNK
    BOX: gl.constexpr = hidden.block_type.shape[0]
    ALL_BOXES: gl.constexpr = WARPGROUPS * BOXES + (EXTRA_ROWS > 0)
    BYTES: gl.constexpr = (
        WIDTH // 128 * weight.block_type.nbytes + ALL_BOXES * hidden.block_type.nbytes
    )
    for _ in range(0, columns, BLOCK_D):
        mbarrier.wait(free.index(stage), phase)
        bar = loaded.index(stage)
        # A box over the edge of a matrix is filled with zeros, and all its bytes count.
        mbarrier.expect(bar, CHUNKS * BYTES)
        for i in gl.static_range(CHUNKS):
            tile = weight_ring.index(stage * CHUNKS + i)
            for block in gl.static_range(WIDTH // 128):
                copy_to_shared(
                    weight, [row0 + block * 128, d0 + i * CHUNK], bar,
                    tile.slice(block * 128, 128, dim=0),
                )  # fmt: skip
        for i in gl.static_range(CHUNKS):
            for group in gl.static_range(WARPGROUPS):
                rows = hidden_ring.index((stage * CHUNKS + i) * WARPGROUPS + group)
                for number in gl.static_range(BOXES):
                    copy_to_shared(
                        hidden, [first_row(b0, B, group, PAIRED, number, BOX), d0 + i * CHUNK],
                        bar, rows.slice(number * BOX, BOX, dim=0),
                    )  # fmt: skip
            if EXTRA_ROWS > 0:
                copy_to_shared(
                    hidden, [first_of_extra_rows(b0, B, EXTRA_ROWS), d0 + i * CHUNK], bar,
                    extra_ring[0].index(stage * CHUNKS + i),
                )  # fmt: skip
        d0 += BLOCK_D
        d0 = gl.where(d0 >= D, 0, d0)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def load_tiles(
    weight, hidden, ring, share, B, D, WARPGROUPS: gl.constexpr, PAIRED: gl.constexpr,
    EXTRA_ROWS: gl.constexpr, BOXES: gl.constexpr, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load all tiles of a program: the code of the loading warp."""
    b0, pid_v, programs_v, first_token, num_tokens = share
    rounds, tail = schedule(num_tokens, programs_v, BLOCK_V)
    stage = 0
    phase = 1
    for r in range(rounds):
        row0 = first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V, CONTIGUOUS)
        if row0 < num_tokens:
            stage, phase = load_columns(
                weight, hidden, ring, stage, phase, row0, first_column(first_token + row0, D), D,
                b0, B, D,
                WARPGROUPS, PAIRED, EXTRA_ROWS, BOXES, BLOCK_V, BLOCK_D, STAGES,
            )  # fmt: skip
    if BLOCK_V > 128:
        row0 = (tail + pid_v) * 128
        if row0 < num_tokens:
            load_columns(
                weight, hidden, ring, stage, phase, row0, first_column(first_token + row0, D), D,
                b0, B, D,
                WARPGROUPS, PAIRED, EXTRA_ROWS, BOXES, 128, BLOCK_D, STAGES,
            )  # fmt: skip


@gluon.jit
def tile_product(
    ring, stage, phase, D, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr, part=0, PARTS: gl.constexpr = 1,
):  # fmt: skip
    """Multiply this warpgroup's rows with the next tile in the ring.

    Args:
        part: the part of the tile, of PARTS parts, that is multiplied.

    Returns:
        (product [ROWS, WIDTH], stage, phase). The product is fp32 for 16-bit operands and int32
        for 8-bit operands.
    """
    BITS: gl.constexpr = ring[0].dtype.primitive_bitwidth
    DTYPE: gl.constexpr = gl.int32 if BITS == 8 else gl.float32
    # With 8-bit operands, or three warpgroups' registers, an instruction has at most 128 columns.
    N: gl.constexpr = min(WIDTH, 128) if BITS == 8 or WARPGROUPS == 3 else WIDTH
    acc = gl.zeros([ROWS, WIDTH], DTYPE, accumulator_layout(N, BITS))
    return add_columns(
        ring, stage, phase, D, acc, False, WARPGROUP, WARPGROUPS, WIDTH, BLOCK_D, STAGES,
        part, PARTS,
    )  # fmt: skip


@gluon.jit
def add_columns(
    ring, stage, phase, columns, acc, use_acc, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, part=0,
    PARTS: gl.constexpr = 1,
):  # fmt: skip
    """Add the product of the next `columns` in the ring to acc, or replace acc if not use_acc."""
    weight_ring, hidden_ring, _, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // weight_ring.shape[2]
    use_acc = gl.to_tensor(use_acc)
    TILES: gl.constexpr = weight_ring.shape[0]
    TOKENS: gl.constexpr = weight_ring.shape[1]
    if PARTS > 1:
        shape: gl.constexpr = [TILES * PARTS, TOKENS // PARTS, CHUNK]
        weight_ring = reinterpreted(weight_ring, weight_ring.dtype, shape, weight_ring.layout)
    for _ in range(0, columns, BLOCK_D):
        mbarrier.wait(loaded.index(stage), phase)
        for i in gl.static_range(CHUNKS):
            tile = stage * CHUNKS + i
            acc = warpgroup_mma(
                hidden_ring.index(tile * WARPGROUPS + WARPGROUP),
                weight_ring.index(tile * PARTS + part).slice(0, WIDTH, dim=0).permute((1, 0)),
                acc,
                use_acc=use_acc,
                is_async=True,
            )
            use_acc = gl.to_tensor(True)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase
