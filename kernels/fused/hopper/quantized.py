"""The Hopper kernel for one-byte weights in Gluon: loads, conversion and products.

The tokens are on the M side of the instruction, whose first operand may be in registers. Each of
two warpgroups converts 128 tokens in registers and multiplies them with the rows of hidden, which
both share: up to 64, or two sets of 64. A block has 256 tokens, and programs share blocks as in
split. A finished tile is transposed, so that the rows are on the M side as in the other kernels. In
the workspace each warpgroup counts as a program.
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
    accumulator_layout,
    barriers,
    copy_to_shared,
    first_row,
    next_stage,
    rows_of_warpgroup,
)
from fsbench.kernels.device.mainloop import first_column
from fsbench.kernels.device.quantized import converted, scaled, scales_of_tokens
from fsbench.kernels.fused.hopper.split import piece, pieces_of, raise_flag, wait_for_flag
from fsbench.kernels.fused.hopper.warpgroup import begin, enter, merge

WARPGROUPS = gl.constexpr(2)
TOKENS = gl.constexpr(128)
"""Tokens of a block that a warpgroup has."""
COLUMNS = gl.constexpr(128)
"""Columns of a stage: the bytes of a row of a TMA box, at most what the swizzle takes."""
PART = gl.constexpr(32)
"""Columns that are converted at once."""
HALVES = gl.constexpr(2)
"""Boxes of hidden in a stage, side by side."""


@gluon.jit
def ring_of_bytes(weight, hidden, HELD: gl.constexpr, STAGES: gl.constexpr):
    """Allocate the ring buffer for one-byte weights and HELD rows of hidden."""
    weight_ring = gl.allocate_shared_memory(
        weight.dtype, [STAGES * WARPGROUPS, TOKENS, COLUMNS], weight.layout
    )
    hidden_ring = gl.allocate_shared_memory(
        hidden.dtype, [STAGES * HALVES, HELD, CHUNK], hidden.layout
    )
    loaded, free = barriers(WARPGROUPS, STAGES)
    return weight_ring, hidden_ring, (), loaded, free


@gluon.jit
def share_of_blocks(share):
    """Return the share with half the tokens: a block of 256 counts as one of split's 128."""
    b0, pid_v, programs_v, first_token, num_tokens = share
    return b0, pid_v, programs_v, first_token, (num_tokens + 1) // 2


@gluon.jit
def load_bytes(
    weight, hidden, ring, share, B, D, SETS: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr
):
    """Load all blocks of a program: the code of the loading warp."""
    weight_ring, hidden_ring, _, loaded, free = ring
    BOX: gl.constexpr = hidden.block_type.shape[0]
    BYTES: gl.constexpr = (
        WARPGROUPS * weight.block_type.nbytes + HALVES * SETS * BOXES * hidden.block_type.nbytes
    )
    b0, _, _, first_token, _ = share
    steps = gl.cdiv(D, COLUMNS)
    pieces = pieces_of(share_of_blocks(share), steps)
    stage = 0
    phase = 1
    for i in range(pieces[0]):
        block, first, end = piece(i, pieces, steps)
        row0 = block * (WARPGROUPS * TOKENS)
        d0 = (first_column(first_token + row0, D) // COLUMNS + first) % steps * COLUMNS
        for step in range(first, end):
            if step % 2 == 0:
                # Neighboring stages are requested together: 256 bytes of a row.
                second_stage, second_phase = next_stage(stage, phase, STAGES)
                mbarrier.wait(free.index(second_stage), second_phase)
            mbarrier.wait(free.index(stage), phase)
            bar = loaded.index(stage)
            # A box over the edge of a matrix is filled with zeros, and all its bytes count.
            mbarrier.expect(bar, BYTES)
            for group in gl.static_range(WARPGROUPS):
                copy_to_shared(
                    weight, [row0 + group * TOKENS, d0], bar,
                    weight_ring.index(stage * WARPGROUPS + group),
                )  # fmt: skip
            for half in gl.static_range(HALVES):
                rows = hidden_ring.index(stage * HALVES + half)
                for number in gl.static_range(SETS * BOXES):
                    copy_to_shared(
                        hidden,
                        [
                            first_row(b0, B, number // BOXES, False, number % BOXES, BOX),
                            d0 + half * CHUNK,
                        ],
                        bar, rows.slice(number * BOX, BOX, dim=0),
                    )  # fmt: skip
            d0 += COLUMNS
            d0 = gl.where(d0 >= D, 0, d0)
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _add_bytes(ring, stage, phase, steps, acc, WARPGROUP: gl.constexpr, STAGES: gl.constexpr):
    """Add the product of the next stages in the ring to acc [TOKENS, HELD]."""
    weight_ring, hidden_ring, _, loaded, free = ring
    LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    for _ in range(0, steps):
        mbarrier.wait(loaded.index(stage), phase)
        bytes = weight_ring.index(stage * WARPGROUPS + WARPGROUP)
        for part in gl.static_range(COLUMNS // PART):
            numbers = bytes.slice(part * PART, PART, dim=1).load(LAYOUT)
            rows = hidden_ring.index(stage * HALVES + part * PART // CHUNK)
            rows = rows.slice(part * PART % CHUNK, PART, dim=1)
            acc = warpgroup_mma(
                converted(numbers, hidden_ring.dtype), rows.permute((1, 0)), acc, is_async=True
            )
            # A product may run while the next part is converted, but not while the part after that
            # is: their operands may be in the same registers. Across stages the compiler refuses.
            if part > 0 and part + 1 < COLUMNS // PART:
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def compute_bytes(
    ring, share, sizes, noise, processing, scratch, scores, handing, scales,
    N: gl.constexpr, NOISE: gl.constexpr, SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr, SCALE_PER_ROW: gl.constexpr,
    STAGES: gl.constexpr, SETS: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
    WARPGROUP: gl.constexpr,
):  # fmt: skip
    """Compute all tiles of a warpgroup with SETS times 64 rows."""
    b0, pid_v, programs_v, first_token, _ = share
    _, V, D, _, _, _ = sizes
    _, _, masses_ptr, _, _, _ = scratch
    HELD: gl.constexpr = SETS * BOX * BOXES
    SUMS: gl.constexpr = accumulator_layout(HELD, 16)
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(1, group_layout(4))
    parts = ()
    states = ()
    for number in gl.static_range(SETS):
        row, row_mask = rows_of_warpgroup(b0, sizes[0], number, False, BOX, BOXES, ROW_LAYOUT)
        part, state = begin(
            row, row_mask, sizes, noise, scratch, scores, N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
            TEMPERATURE_PER_ROW,
        )  # fmt: skip
        parts += (part,)
        states += (state,)
    steps = gl.cdiv(D, COLUMNS)
    pieces = pieces_of(share_of_blocks(share), steps)
    stage = 0
    phase = 0
    for i in range(pieces[0]):
        block, first, end = piece(i, pieces, steps)
        v0 = first_token + (block * WARPGROUPS + WARPGROUP) * TOKENS
        tokens = v0 + gl.arange(0, TOKENS, gl.SliceLayout(1, SUMS))
        scale = scales_of_tokens(scales[0], tokens, V, SCALE_PER_ROW)
        acc = gl.zeros([TOKENS, HELD], gl.float32, SUMS)
        if first > 0:
            acc = _taken_over((pid_v - pieces[0] + i) * WARPGROUPS + WARPGROUP, handing, HELD)
        acc, stage, phase = _add_bytes(ring, stage, phase, end - first, acc, WARPGROUP, STAGES)
        if end < steps:
            _hand_over(acc, (pid_v + i) * WARPGROUPS + WARPGROUP, handing)
        else:
            logits = scaled(acc, scale[:, None])
            row_sets = _sets(logits.permute((1, 0)))
            merged = ()
            for number in gl.static_range(SETS):
                merged += (enter(
                    gl.convert_layout(row_sets[number], accumulator_layout(TOKENS, 16)), v0,
                    parts[number], states[number], sizes, processing,
                    N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0,
                ),)  # fmt: skip
            states = merged
    slot, slots = WARPGROUP * programs_v + pid_v, WARPGROUPS * programs_v
    for number in gl.static_range(SETS):
        merge(parts[number], states[number], slot, slots, sizes, scratch, scores, N)


@gluon.jit
def _sets(x):
    """Split [rows, TOKENS] into a tuple of [ROWS, TOKENS]; fewer than ROWS rows are repeated."""
    if x.shape[0] < ROWS:
        return _sets(gl.join(x, x).permute((2, 0, 1)).reshape([2 * x.shape[0], x.shape[1]]))
    elif x.shape[0] > ROWS:
        return x.reshape([2, ROWS, x.shape[1]]).permute((1, 2, 0)).split()
    else:
        return (x,)


@gluon.jit
def sums_of_program(sums_ptr, flags_ptr, program, HELD: gl.constexpr):
    """Return the pointers to a program's partial sums and to its flags."""
    number = program * WARPGROUPS
    return sums_ptr + number * TOKENS * HELD, flags_ptr + number


@gluon.jit
def _hand_over(acc, number, handing):
    """Store the partial sum for the same warpgroup of the next program."""
    sums_ptr, flags_ptr = handing
    gl.store(sums_ptr + _places(number, acc.shape[1]), acc)
    raise_flag(flags_ptr + number)


@gluon.jit
def _taken_over(number, handing, HELD: gl.constexpr):
    """Wait for the partial sum of a warpgroup, load it and reset its flag to 0."""
    sums_ptr, flags_ptr = handing
    wait_for_flag(flags_ptr + number)
    return gl.load(sums_ptr + _places(number, HELD), cache_modifier=".cg")


@gluon.jit
def _places(number, HELD: gl.constexpr):
    """Return the indices of a warpgroup's partial sum, [TOKENS, HELD]."""
    LAYOUT: gl.constexpr = accumulator_layout(HELD, 16)
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))[:, None]
    row = gl.arange(0, HELD, gl.SliceLayout(0, LAYOUT))[None, :]
    return (number * TOKENS + token) * HELD + row
