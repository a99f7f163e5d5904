"""The Hopper screen: which tiles a program has, and the warp that loads them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fsbench.kernels.device.hopper_epilogue import ROWS as BOX_ROWS
from fsbench.kernels.device.hopper_mainloop import copy_to_shared, next_stage, schedule
from fsbench.kernels.device.mainloop import first_column
from fsbench.kernels.screened.rounding import ask_for_hidden, wait_for_rows

COLUMNS = gl.constexpr(128)
"""Columns of a TMA box: 128 bytes, the widest that its swizzle takes."""


@gluon.jit
def allocated_ring(copy, codes, ROWS: gl.constexpr, BLOCK_V: gl.constexpr,
                    BLOCK_D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Like hopper_mainloop.allocated_ring, but only one partition releases each stage."""
    CHUNKS: gl.constexpr = BLOCK_D // COLUMNS
    weight_ring = gl.allocate_shared_memory(
        copy.dtype, [STAGES * CHUNKS, BLOCK_V, COLUMNS], copy.layout
    )
    codes_ring = gl.allocate_shared_memory(
        codes.dtype, [STAGES * CHUNKS, 2 * ROWS, COLUMNS], codes.layout
    )
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    return weight_ring, codes_ring, loaded, free


@gluon.jit
def tiles(share, V, BLOCK_V: gl.constexpr):
    """Return (a program's number of tiles of BLOCK_V tokens, first token of its tile in the tail).

    A tile of the tail has 128 tokens. The program has no such tile if its first token is V or more.
    """
    _, pid_v, programs_v = share
    rounds, tail = schedule(V, programs_v, BLOCK_V)
    num_tiles = gl.cdiv(gl.maximum(gl.cdiv(V, BLOCK_V) - pid_v, 0), programs_v)
    return gl.minimum(rounds, num_tiles), (tail + pid_v) * 128


@gluon.jit
def _tile_of_step(g, steps, share, V, D, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr):
    """Return (first token, first column, whether the tile has BLOCK_V tokens) of step g.

    The tile of the tail has 128 tokens. As in the fused kernels, programs begin at different
    columns.
    """
    _, pid_v, programs_v = share
    rounds, tail = tiles(share, V, BLOCK_V)
    r = g // steps
    whole = r < rounds
    v0 = gl.where(whole, (pid_v + r * programs_v) * BLOCK_V, tail)
    d0 = (first_column(v0, D) // BLOCK_D + g % steps) % steps * BLOCK_D
    return v0, d0, whole


@gluon.jit
def _copy_weight(copy, codes, ring, stage, g, steps, share, V, D, ROWS: gl.constexpr,
                 BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr):  # fmt: skip
    """Start copying the part of the int8 copy of step g, and expect the part of the codes too."""
    weight_ring, _, loaded, _ = ring
    CHUNKS: gl.constexpr = BLOCK_D // COLUMNS
    BLOCKS: gl.constexpr = BLOCK_V // 128
    v0, d0, whole = _tile_of_step(g, steps, share, V, D, BLOCK_V, BLOCK_D)
    bar = loaded.index(stage)
    # Boxes over the edge of a matrix are padded with zeros, and count in full.
    BOXES: gl.constexpr = CHUNKS * copy.block_type.nbytes
    CODES: gl.constexpr = CHUNKS * (2 * ROWS // BOX_ROWS) * codes.block_type.nbytes
    if whole:
        mbarrier.expect(bar, BLOCKS * BOXES + CODES)
    else:
        mbarrier.expect(bar, BOXES + CODES)
    for i in gl.static_range(CHUNKS):
        tile = weight_ring.index(stage * CHUNKS + i)
        copy_to_shared(copy, [v0, d0 + i * COLUMNS], bar, tile.slice(0, 128, dim=0))
        if whole:
            for block in gl.static_range(1, BLOCKS):
                rows = tile.slice(block * 128, 128, dim=0)
                copy_to_shared(copy, [v0 + block * 128, d0 + i * COLUMNS], bar, rows)


@gluon.jit
def _copy_codes(codes, ring, stage, g, steps, share, V, D, ROWS: gl.constexpr,
                BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr):  # fmt: skip
    """Start copying the part of the codes of hidden of step g."""
    _, codes_ring, loaded, _ = ring
    CHUNKS: gl.constexpr = BLOCK_D // COLUMNS
    BOX: gl.constexpr = codes.block_type.shape[0]
    _, d0, _ = _tile_of_step(g, steps, share, V, D, BLOCK_V, BLOCK_D)
    for i in gl.static_range(CHUNKS):
        tile = codes_ring.index(stage * CHUNKS + i)
        for row in gl.static_range(0, 2 * ROWS, BOX_ROWS):
            copy_to_shared(
                codes, [2 * share[0] + row, d0 + i * COLUMNS], loaded.index(stage),
                tile.slice(row, BOX, dim=0),
            )  # fmt: skip


@gluon.jit
def load(copy, codes, hidden_ptr, ring, share, counters_ptr, B, V, D, ROWS: gl.constexpr,
         BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Run the loading warp. The int8 copy is constant; the codes must have been written."""
    _, _, _, free = ring
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    ask_for_hidden(hidden_ptr, lane, B, D)
    steps = gl.cdiv(D, BLOCK_D)
    rounds, tail = tiles(share, V, BLOCK_V)
    total = (rounds + (tail < V).to(gl.int32)) * steps
    head = gl.minimum(total, STAGES)
    for g in range(head):
        _copy_weight(copy, codes, ring, g, g, steps, share, V, D, ROWS, BLOCK_V, BLOCK_D)
    wait_for_rows(counters_ptr, B, True)
    for g in range(head):
        _copy_codes(codes, ring, g, g, steps, share, V, D, ROWS, BLOCK_V, BLOCK_D)
    stage = 0
    phase = 0
    for g in range(head, total):
        mbarrier.wait(free.index(stage), phase)
        _copy_weight(copy, codes, ring, stage, g, steps, share, V, D, ROWS, BLOCK_V, BLOCK_D)
        _copy_codes(codes, ring, stage, g, steps, share, V, D, ROWS, BLOCK_V, BLOCK_D)
        stage, phase = next_stage(stage, phase, STAGES)
