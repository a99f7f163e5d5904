"""The matmul of the Hopper kernel, in Gluon: a program's tiles, how they are loaded and multiplied.

Between the warp that loads and the warpgroups that compute is a ring of stages in shared memory:
(tiles of weight, tiles of hidden, barriers of what is loaded, barriers of what is free again).
Portable twin: device.mainloop, which has what the two share.
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
from fsbench.kernels.device.hopper_epilogue import ROWS, group_layout
from fsbench.kernels.device.mainloop import first_column

# Triton 3.6 knows one of its names, 3.9 the other.
copy_to_shared = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

CHUNK = gl.constexpr(hopper.CHUNK)


@gluon.constexpr_function
def _accumulator_layout(N, BITS):
    """Of an instruction for N columns, whose operands have so many bits."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 256 // BITS]
    )


@gluon.constexpr_function
def pieces_of(rows):
    """The powers of two that rows on the N side are made of: an instruction for each."""
    return tuple(1 << bit for bit in (7, 6, 5, 4, 3) if rows >> bit & 1)


@gluon.constexpr_function
def first_of_piece(rows, piece):
    """Where a piece begins."""
    return sum(1 << bit for bit in [bit for bit in (7, 6, 5, 4, 3) if rows >> bit & 1][:piece])


@gluon.jit
def allocated_ring(
    weight, hidden, WARPGROUPS: gl.constexpr, BLOCK_V: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, ROWS_ON_N: gl.constexpr = 0,
):  # fmt: skip
    """A ring in shared memory, all of it free. weight, hidden: descriptors.

    With rows on the N side its tiles of hidden are a tuple, of pieces_of(ROWS_ON_N).
    """
    BOX: gl.constexpr = weight.block_type.shape[1]
    CHUNKS: gl.constexpr = BLOCK_D // BOX
    weight_ring = gl.allocate_shared_memory(
        weight.dtype, [STAGES * CHUNKS, BLOCK_V, BOX], weight.layout
    )
    if ROWS_ON_N:
        PIECES: gl.constexpr = pieces_of(ROWS_ON_N)
        hidden_ring = ()
        for i in gl.static_range(len(PIECES)):
            hidden_ring += (_tiles(hidden, STAGES * CHUNKS, PIECES[i]),)
    else:
        hidden_ring = _tiles(hidden, STAGES * CHUNKS * WARPGROUPS, ROWS)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
        mbarrier.init(free.index(i), count=WARPGROUPS)
    fence_async_shared()
    return weight_ring, hidden_ring, loaded, free


@gluon.jit
def _tiles(hidden, number: gl.constexpr, rows: gl.constexpr):
    """Room for tiles of hidden."""
    shape: gl.constexpr = [number, rows, hidden.block_type.shape[1]]
    return gl.allocate_shared_memory(hidden.dtype, shape, hidden.layout)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and the phase of its barriers."""
    stage += 1
    wrap = stage == STAGES
    return gl.where(wrap, 0, stage), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def first_of_box(row, B, BOX: gl.constexpr):
    """First row of a box that is to begin at `row`. It repeats rows where it would end beyond B.

    TMA takes longer for rows that are not there than for those that are: a batch of 40 in a box of
    64 took 10 % longer than one of 48 (results/h200/sweep-20261123).
    """
    return gl.minimum(row, gl.maximum(B - BOX, 0))


@gluon.jit
def rows_of_warpgroup(
    b0, B, WARPGROUP: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """(row, whether it is there and no repetition) of each row of its instruction, [ROWS]."""
    index = gl.arange(0, ROWS, LAYOUT)
    first = b0 + WARPGROUP * ROWS
    row = first_of_box(first, B, BOX) + index
    own = row >= first
    if BOXES == 2:
        # What is behind the second box has not been loaded, and its row is none.
        second = first_of_box(first + BOX, B, BOX) + index - BOX
        own = (index < BOX) | (second >= BOX)
        row = gl.where(index < BOX, row, gl.where(index < 2 * BOX, second, B))
    return row, (row < B) & own


@gluon.jit
def schedule(num_tokens, programs_v, BLOCK_V: gl.constexpr):
    """(rounds, first tail block): the rank's tokens as rounds of a tile per program, and a tail.

    With tiles of two blocks of 128 tokens, the blocks of a last round may be few enough for one
    each: then they are the tail, and program p has the block first + p of it.
    """
    blocks = gl.cdiv(num_tokens, 128)
    if BLOCK_V == 128:
        return gl.cdiv(blocks, programs_v), blocks
    else:
        rounds = blocks // (2 * programs_v)
        rest = blocks - rounds * 2 * programs_v
        rounds = gl.where(rest > programs_v, rounds + 1, rounds)
        return rounds, rounds * 2 * programs_v


@gluon.jit
def first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr):
    """The row of weight where a program's tile of round r begins."""
    if CONTIGUOUS:
        return (pid_v * rounds + r) * BLOCK_V
    else:
        return (r * programs_v + pid_v) * BLOCK_V


@gluon.jit
def program_of(row, num_tokens, programs_v, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr):
    """The program that meets the token of a row of weight."""
    rounds, tail = schedule(num_tokens, programs_v, BLOCK_V)
    tile = row // BLOCK_V
    program = tile // gl.maximum(rounds, 1) if CONTIGUOUS else tile % programs_v
    return gl.where(row < tail * 128, program, row // 128 - tail)


@gluon.jit
def meeting(
    row, num_tokens, programs_v, SHARES: gl.constexpr, BLOCK_V: gl.constexpr,
    CONTIGUOUS: gl.constexpr,
):  # fmt: skip
    """Who meets the token of a row of weight: a program, or one of SHARES warpgroups of each."""
    program = program_of(row, num_tokens, programs_v, BLOCK_V, CONTIGUOUS)
    if SHARES == 1:
        return program
    else:
        _, tail = schedule(num_tokens, programs_v, BLOCK_V)
        block = row // 128
        return program * SHARES + gl.where(block < tail, block % SHARES, 0)


@gluon.jit
def _load_tile(
    weight, hidden, ring, stage, phase, row0, v0, b0, B, D,
    ROWS_ON_N: gl.constexpr, WARPGROUPS: gl.constexpr, BOXES: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy what a tile of WIDTH tokens needs into the ring, stage by stage as they become free.

    Its first row of weight, row0, is token v0.
    """
    weight_ring, hidden_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // CHUNK
    BOX: gl.constexpr = hidden.block_type.shape[0]
    OF_HIDDEN: gl.constexpr = ROWS_ON_N // BOX if ROWS_ON_N else WARPGROUPS * BOXES
    BYTES: gl.constexpr = (
        WIDTH // 128 * weight.block_type.nbytes + OF_HIDDEN * hidden.block_type.nbytes
    )
    d0 = first_column(v0, D)
    for _ in range(0, D, BLOCK_D):
        mbarrier.wait(free.index(stage), phase)
        bar = loaded.index(stage)
        # Boxes over the edge of a matrix are filled up with zeros, and count in full.
        mbarrier.expect(bar, CHUNKS * BYTES)
        for i in gl.static_range(CHUNKS):
            tile = weight_ring.index(stage * CHUNKS + i)
            for block in gl.static_range(WIDTH // 128):
                copy_to_shared(
                    weight, [row0 + block * 128, d0 + i * CHUNK], bar,
                    tile.slice(block * 128, 128, dim=0),
                )  # fmt: skip
        for i in gl.static_range(CHUNKS):
            if ROWS_ON_N:
                for part in gl.static_range(len(hidden_ring)):
                    rows = hidden_ring[part].index(stage * CHUNKS + i)
                    for number in gl.static_range(rows.shape[0] // BOX):
                        first = first_of_piece(ROWS_ON_N, part) + number * BOX
                        copy_to_shared(
                            hidden, [first_of_box(b0 + first, B, BOX), d0 + i * CHUNK], bar,
                            rows.slice(number * BOX, BOX, dim=0),
                        )  # fmt: skip
            else:
                for group in gl.static_range(WARPGROUPS):
                    rows = hidden_ring.index((stage * CHUNKS + i) * WARPGROUPS + group)
                    for number in gl.static_range(BOXES):
                        first = b0 + group * ROWS + number * BOX
                        copy_to_shared(
                            hidden, [first_of_box(first, B, BOX), d0 + i * CHUNK], bar,
                            rows.slice(number * BOX, BOX, dim=0),
                        )  # fmt: skip
        d0 += BLOCK_D
        d0 = gl.where(d0 >= D, 0, d0)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def load_tiles(
    weight, hidden, ring, share, B, D, ROWS_ON_N: gl.constexpr, WARPGROUPS: gl.constexpr,
    BOXES: gl.constexpr, BLOCK_V: gl.constexpr, CONTIGUOUS: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The loading warp."""
    b0, pid_v, programs_v, first_token, num_tokens = share
    rounds, tail = schedule(num_tokens, programs_v, BLOCK_V)
    stage = 0
    phase = 1
    for r in range(rounds):
        row0 = first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V, CONTIGUOUS)
        if row0 < num_tokens:
            stage, phase = _load_tile(
                weight, hidden, ring, stage, phase, row0, first_token + row0, b0, B, D,
                ROWS_ON_N, WARPGROUPS, BOXES, BLOCK_V, BLOCK_D, STAGES,
            )  # fmt: skip
    if BLOCK_V > 128:
        row0 = (tail + pid_v) * 128
        if row0 < num_tokens:
            _load_tile(
                weight, hidden, ring, stage, phase, row0, first_token + row0, b0, B, D,
                ROWS_ON_N, WARPGROUPS, BOXES, 128, BLOCK_D, STAGES,
            )  # fmt: skip


@gluon.jit
def tile_product(
    ring, stage, phase, D, WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr, WIDTH: gl.constexpr,
    BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """This warpgroup's product of the next tile in the ring, [ROWS, WIDTH], and where that ends.

    Of 16-bit numbers it is fp32, of bytes int32.

    Returns:
        (product, stage, phase).
    """
    weight_ring, hidden_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // weight_ring.shape[2]
    BITS: gl.constexpr = weight_ring.dtype.primitive_bitwidth
    DTYPE: gl.constexpr = gl.int32 if BITS == 8 else gl.float32
    # On bytes, and with the registers of three warpgroups, an instruction has at most 128 columns.
    N: gl.constexpr = min(WIDTH, 128) if BITS == 8 or WARPGROUPS == 3 else WIDTH
    acc = gl.zeros([ROWS, WIDTH], DTYPE, _accumulator_layout(N, BITS))
    use_acc = False
    for _ in range(0, D, BLOCK_D):
        mbarrier.wait(loaded.index(stage), phase)
        for i in gl.static_range(CHUNKS):
            at = stage * CHUNKS + i
            acc = warpgroup_mma(
                hidden_ring.index(at * WARPGROUPS + WARPGROUP),
                weight_ring.index(at).slice(0, WIDTH, dim=0).permute((1, 0)),
                acc,
                use_acc=use_acc,
                is_async=True,
            )
            use_acc = True
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.constexpr_function
def sizes_of_parts(rows):
    """Of rows on the N side, the parts that the epilogue takes one after the other."""
    if rows == 0:
        return (hopper.ROWS,)
    rest = rows % hopper.ROWS
    return (hopper.ROWS,) * (rows // hopper.ROWS) + pieces_of(rest)


@gluon.jit
def rows_of_part(b0, B, part: gl.constexpr, BOX: gl.constexpr, R: gl.constexpr):
    """Like rows_of_warpgroup, [R], of a part of rows on the N side."""
    index = part * ROWS + gl.arange(0, R, gl.SliceLayout(1, group_layout(4, R)))
    first = b0 + index // BOX * BOX
    row = first_of_box(first, B, BOX) + index % BOX
    return row, (row < B) & (row >= first)


@gluon.jit
def turned_product(
    ring, stage, phase, D, WARPGROUP: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr
):
    """As tile_product with rows on the N side: [128, P] of this warpgroup's tokens for each piece.

    Returns:
        (products, stage, phase).
    """
    weight_ring, hidden_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // weight_ring.shape[2]
    products = ()
    for piece in gl.static_range(len(hidden_ring)):
        products += (_no_product(hidden_ring[piece].shape[1]),)
    use_acc = False
    for _ in range(0, D, BLOCK_D):
        mbarrier.wait(loaded.index(stage), phase)
        for i in gl.static_range(CHUNKS):
            at = stage * CHUNKS + i
            tokens = weight_ring.index(at).slice(WARPGROUP * 128, 128, dim=0)
            more = ()
            for piece in gl.static_range(len(hidden_ring)):
                more += (
                    warpgroup_mma(
                        tokens,
                        hidden_ring[piece].index(at).permute((1, 0)),
                        products[piece],
                        use_acc=use_acc,
                        is_async=True,
                    ),
                )
            products = more
            use_acc = True
        waited = warpgroup_mma_wait(num_outstanding=0, deps=products)
        products = waited if len(products) > 1 else (waited,)
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return products, stage, phase


@gluon.jit
def _no_product(rows: gl.constexpr):
    return gl.zeros([128, rows], gl.float32, _accumulator_layout(rows, 16))


@gluon.jit
def skip_tile(ring, stage, phase, D, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    """Let a tile in the ring pass by, of which this warpgroup has no tokens."""
    _, _, loaded, free = ring
    for _ in range(0, D, BLOCK_D):
        mbarrier.wait(loaded.index(stage), phase)
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase
