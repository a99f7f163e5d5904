"""Mixed blocks of the Hopper kernel in Gluon: 144 or 160 rows, in two orientations.

The first 128 rows are on the M side of the instruction, 64 for each of two warpgroups, as in
fused.hopper.warpgroup. For the 16 or 32 extra rows the tokens are on the M side, and each
warpgroup multiplies half of a tile's tokens with them; a third warpgroup would compute 64 rows. The
logits of these rows are transposed, so that a thread has whole groups. In their workspace each
warpgroup counts as a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fsbench.kernels.device.hopper_epilogue import ROWS, group_layout
from fsbench.kernels.device.hopper_mainloop import (
    CHUNK,
    EXTRA_BOX,
    accumulator_layout,
    first_of_extra_rows,
    first_of_tile,
    next_stage,
    rows_of_warpgroup,
    schedule,
)
from fsbench.kernels.fused.hopper.warpgroup import begin, enter, merge, store_no_mass

TOKENS = gl.constexpr(128)
"""Tokens of a tile that a warpgroup multiplies with the extra rows."""


@gluon.constexpr_function
def _transposed_layout():
    """Return the layout of [EXTRA_BOX, TOKENS / 2] whose threads have half of a group's tokens."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [0, 16], [0, 32]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 64],
    )


@gluon.jit
def _transposed(x):
    """Transpose logits [TOKENS, EXTRA_ROWS] to [EXTRA_BOX, TOKENS]; 16 rows are repeated.

    Two halves of the tokens take turns in shared memory.
    """
    low, high = x.reshape([2, TOKENS // 2, x.shape[1]]).permute((2, 1, 0)).split()
    return gl.join(_half(low), _half(high)).permute((0, 2, 1)).reshape([EXTRA_BOX, TOKENS])


@gluon.jit
def _half(x):
    if x.shape[0] < EXTRA_BOX:
        x = gl.join(x, x).permute((2, 0, 1)).reshape([EXTRA_BOX, TOKENS // 2])
    return gl.convert_layout(x, _transposed_layout())


@gluon.jit
def _extra_rows(b0, B, EXTRA_ROWS: gl.constexpr):
    """Return the rows of `_transposed` logits, and which are below B and no repetition."""
    index = gl.arange(0, EXTRA_BOX, gl.SliceLayout(1, group_layout(4, EXTRA_BOX)))
    row = first_of_extra_rows(b0, B, EXTRA_ROWS) + (EXTRA_BOX - EXTRA_ROWS) + index % EXTRA_ROWS
    return row, (index < EXTRA_ROWS) & (row >= b0 + 2 * ROWS) & (row < B)


@gluon.jit
def _products(
    ring, stage, phase, D, WARPGROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, EXTRA_ROWS: gl.constexpr,
):  # fmt: skip
    """Multiply the next tile with the rows of this warpgroup, and its tokens with the extra rows.

    Returns:
        (fp32 [ROWS, WIDTH], fp32 [EXTRA_BOX, TOKENS], stage, phase). The second has no meaning if
        the tile ends before this warpgroup's tokens.
    """
    weight_ring, hidden_ring, extra_ring, loaded, free = ring
    CHUNKS: gl.constexpr = BLOCK_D // CHUNK
    HAS_TOKENS: gl.constexpr = WIDTH > WARPGROUP * TOKENS
    acc = gl.zeros([ROWS, WIDTH], gl.float32, accumulator_layout(WIDTH, 16))
    extra = gl.zeros([TOKENS, EXTRA_ROWS], gl.float32, accumulator_layout(EXTRA_ROWS, 16))
    use_acc = gl.to_tensor(False)
    for _ in range(0, D, BLOCK_D):
        mbarrier.wait(loaded.index(stage), phase)
        for i in gl.static_range(CHUNKS):
            tile = stage * CHUNKS + i
            tokens = weight_ring.index(tile)
            acc = warpgroup_mma(
                hidden_ring.index(tile * 2 + WARPGROUP),
                tokens.slice(0, WIDTH, dim=0).permute((1, 0)),
                acc,
                use_acc=use_acc,
                is_async=True,
            )
            if HAS_TOKENS:
                rows = extra_ring[0].index(tile).slice(EXTRA_BOX - EXTRA_ROWS, EXTRA_ROWS, dim=0)
                extra = warpgroup_mma(
                    tokens.slice(WARPGROUP * TOKENS, TOKENS, dim=0),
                    rows.permute((1, 0)),
                    extra,
                    use_acc=use_acc,
                    is_async=True,
                )
            use_acc = gl.to_tensor(True)
        if HAS_TOKENS:
            acc, extra = warpgroup_mma_wait(num_outstanding=0, deps=(acc, extra))
        else:
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, _transposed(extra), stage, phase


@gluon.jit
def _tile(
    ring, stage, phase, v0, parts, states, sizes, processing,
    N: gl.constexpr, NOISE: gl.constexpr, GREEDY_ROWS: gl.constexpr, WITH_MASS: gl.constexpr,
    WARPGROUP: gl.constexpr, WIDTH: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    EXTRA_ROWS: gl.constexpr,
):  # fmt: skip
    """Compute the next tile in the ring and merge it; return (stage, phase, states)."""
    state, extra_state = states
    _, _, D, _, _, _ = sizes
    logits, extra_logits, stage, phase = _products(
        ring, stage, phase, D, WARPGROUP, WIDTH, BLOCK_D, STAGES, EXTRA_ROWS
    )
    if WIDTH > WARPGROUP * TOKENS:
        extra_state = enter(
            extra_logits, v0 + WARPGROUP * TOKENS, parts[1], extra_state, sizes, processing,
            N, NOISE, GREEDY_ROWS, WITH_MASS,
        )  # fmt: skip
    state = enter(logits, v0, parts[0], state, sizes, processing, N, NOISE, GREEDY_ROWS, WITH_MASS)
    return stage, phase, (state, extra_state)


@gluon.jit
def compute_mixed(
    ring, share, sizes, noise, processing, scratch, scores,
    N: gl.constexpr, NOISE: gl.constexpr, SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr, BLOCK_V: gl.constexpr,
    CONTIGUOUS: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, EXTRA_ROWS: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Compute all tiles of the program for a warpgroup's rows, and its tokens for the extra rows.

    The tail has tokens for the first warpgroup only.
    """
    b0, pid_v, programs_v, first_token, num_tokens = share
    B, _, _, _, _, _ = sizes
    _, _, masses_ptr, _, _, _ = scratch
    row, mask = rows_of_warpgroup(
        b0, B, WARPGROUP, False, EXTRA_BOX, ROWS // EXTRA_BOX, gl.SliceLayout(1, group_layout(4))
    )
    extra_row, extra_mask = _extra_rows(b0, B, EXTRA_ROWS)
    part, state = begin(
        row, mask, sizes, noise, scratch, scores, N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )  # fmt: skip
    extra_part, extra_state = begin(
        extra_row, extra_mask, sizes, noise, scratch, scores, N, NOISE, SEED_PER_ROW,
        OFFSET_PER_ROW, TEMPERATURE_PER_ROW,
    )  # fmt: skip
    parts = (part, extra_part)
    states = (state, extra_state)
    rounds, tail = schedule(num_tokens, programs_v, BLOCK_V)
    stage = 0
    phase = 0
    for r in range(rounds):
        row0 = first_of_tile(r, rounds, pid_v, programs_v, BLOCK_V, CONTIGUOUS)
        if row0 < num_tokens:
            stage, phase, states = _tile(
                ring, stage, phase, first_token + row0, parts, states, sizes, processing,
                N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0, WARPGROUP, BLOCK_V, BLOCK_D,
                STAGES, EXTRA_ROWS,
            )  # fmt: skip
    row0 = (tail + pid_v) * 128
    if row0 < num_tokens:
        stage, phase, states = _tile(
            ring, stage, phase, first_token + row0, parts, states, sizes, processing,
            N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0, WARPGROUP, TOKENS, BLOCK_D, STAGES,
            EXTRA_ROWS,
        )  # fmt: skip
    state, extra_state = states
    slots = 2 * programs_v
    merge(part, state, pid_v, slots, sizes, scratch, scores, N)
    merge(extra_part, extra_state, pid_v + WARPGROUP * programs_v, slots, sizes, scratch, scores, N)
    store_no_mass(part, programs_v + pid_v, slots, B, scratch, scores)
