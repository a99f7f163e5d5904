"""Split-K for small heads in Gluon: two programs share the sum over D of a block of tokens.

A small head has few blocks of 128 tokens for each program. In the last round most multiprocessors
would be idle, and the others limited by the bandwidth of one. Narrower blocks would change the
noise. So the steps of all blocks, in order, are cut into equal shares, one for each program. A
share ends with the first steps of a block. The program computes these before all others and stores
the fp32 partial sum for the next program, whose share begins with the other steps of the block. The
next program computes these last. The tensor core continues the same sum in the same order, so the
logits are bitwise those of whole blocks.

Usually the partial sum is stored by the time it is needed. A program waits only for one with a
lower number, which the GPU starts first, so the two need not run at the same time.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.device.hopper_epilogue import ROWS, group_layout
from fsbench.kernels.device.hopper_mainloop import (
    accumulator_layout,
    add_columns,
    load_columns,
    rows_of_warpgroup,
)
from fsbench.kernels.device.mainloop import first_column
from fsbench.kernels.fused.hopper.warpgroup import begin, enter, merge


@triton.jit
def first_step(program, total, programs):
    """Return the first of a program's steps among the total."""
    return total // programs * program + tl.minimum(program, total % programs)


@triton.jit
def program_of_step(step, total, programs):
    """Return the program that computes a step."""
    most = total // programs + 1
    longer = total % programs * most  # steps of the first programs, which have one step more
    return tl.where(step < longer, step // most, (step - longer) // (most - 1) + total % programs)


@triton.jit
def program_of_block(block, num_tokens, programs, D, BLOCK_D: tl.constexpr):
    """Return the program that computes the last step of a block, and so its logits."""
    steps = tl.cdiv(D, BLOCK_D)
    return program_of_step(block * steps + steps - 1, tl.cdiv(num_tokens, 128) * steps, programs)


@triton.jit
def pieces_of(share, steps):
    """Return (number of pieces of a program, its first step, the next program's first step)."""
    _, pid_v, programs_v, _, num_tokens = share
    total = tl.cdiv(num_tokens, 128) * steps
    begin = first_step(pid_v, total, programs_v)
    end = first_step(pid_v + 1, total, programs_v)
    return tl.cdiv(end, steps) - begin // steps, begin, end


@triton.jit
def piece(i, pieces, steps):
    """Return (block, first step, end step) of a program's piece i, in order of execution.

    The piece that ends within a block is the first, the piece that begins within one the last. A
    share has at least the steps of a block, so the two differ.
    """
    _, begin, end = pieces
    whole = tl.cdiv(begin, steps)  # the first block that begins in this share
    has_head = (end % steps > 0).to(tl.int32)
    block = whole + i - has_head
    is_head = block < whole
    is_tail = block == end // steps
    return (
        tl.where(is_head, end // steps, tl.where(is_tail, whole - 1, block)),
        tl.where(is_tail, begin % steps, 0),
        tl.where(is_head, end % steps, steps),
    )


@gluon.jit
def load_pieces(
    weight, hidden, ring, share, B, D,
    BOXES: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load all pieces of a program: the code of the loading warp, in place of load_tiles."""
    b0, _, _, first_token, _ = share
    steps = gl.cdiv(D, BLOCK_D)
    pieces = pieces_of(share, steps)
    stage = 0
    phase = 1
    for i in range(pieces[0]):
        block, first, end = piece(i, pieces, steps)
        row0 = block * 128
        d0 = (first_column(first_token + row0, D) // BLOCK_D + first) % steps * BLOCK_D
        stage, phase = load_columns(
            weight, hidden, ring, stage, phase, row0, d0, (end - first) * BLOCK_D, b0, B, D,
            1, False, 0, BOXES, 128, BLOCK_D, STAGES,
        )  # fmt: skip


@gluon.jit
def compute_pieces(
    ring, share, sizes, noise, processing, scratch, scores, handing,
    N: gl.constexpr, NOISE: gl.constexpr, SEED_PER_ROW: gl.constexpr,
    OFFSET_PER_ROW: gl.constexpr, TEMPERATURE_PER_ROW: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Compute all pieces in the one computing warpgroup, in place of warpgroup.compute.

    handing: (partial sums fp32 [programs, HELD, 128], flags int32 [programs], 0 between calls).
    """
    b0, pid_v, programs_v, first_token, _ = share
    B, _, D, _, _, _ = sizes
    _, _, masses_ptr, _, _, _ = scratch
    HELD: gl.constexpr = BOX * BOXES  # rows of the instruction that hidden is loaded to
    LAYOUT: gl.constexpr = gl.SliceLayout(1, group_layout(4))
    row, row_mask = rows_of_warpgroup(b0, B, 0, False, BOX, BOXES, LAYOUT)
    part, state = begin(
        row, row_mask, sizes, noise, scratch, scores, N, NOISE, SEED_PER_ROW, OFFSET_PER_ROW,
        TEMPERATURE_PER_ROW,
    )  # fmt: skip
    steps = gl.cdiv(D, BLOCK_D)
    pieces = pieces_of(share, steps)
    stage = 0
    phase = 0
    # Piece 0 may be stored as a partial sum, and the last piece may continue one. The addresses
    # depend on i so that the compiler computes the 64 of a thread late and keeps no registers.
    for i in range(pieces[0]):
        block, first, end = piece(i, pieces, steps)
        acc = gl.zeros([ROWS, 128], gl.float32, accumulator_layout(128, 16))
        if first > 0:
            acc = _taken_over(pid_v - pieces[0] + i, handing, HELD)
        acc, stage, phase = add_columns(
            ring, stage, phase, (end - first) * BLOCK_D, acc, first > 0, 0, 1, 128, BLOCK_D, STAGES
        )
        if end < steps:
            _hand_over(acc, pid_v + i, handing, HELD)
        else:
            state = enter(
                acc, first_token + block * 128, part, state, sizes, processing,
                N, NOISE, TEMPERATURE_PER_ROW, len(masses_ptr) > 0,
            )  # fmt: skip
    merge(part, state, pid_v, programs_v, sizes, scratch, scores, N)


@gluon.jit
def raise_flag(flag_ptr):
    """Signal that the stores of all of the program's threads are complete."""
    tl.debug_barrier()
    gl.atomic_xchg(flag_ptr, 1, sem="release")


@gluon.jit
def wait_for_flag(flag_ptr):
    """Wait for `raise_flag`, and reset the flag to 0."""
    while gl.atomic_cas(flag_ptr, 1, 0, sem="acquire") == 0:
        pass


@gluon.jit
def _hand_over(acc, program, handing, HELD: gl.constexpr):
    """Store the partial sum for the next program."""
    sums_ptr, flags_ptr = handing
    offsets, mask = _places(program, HELD)
    gl.store(sums_ptr + offsets, acc, mask=mask)
    raise_flag(flags_ptr + program)


@gluon.jit
def _taken_over(program, handing, HELD: gl.constexpr):
    """Wait for the partial sum of a program, load it and reset its flag to 0."""
    sums_ptr, flags_ptr = handing
    wait_for_flag(flags_ptr + program)
    offsets, mask = _places(program, HELD)
    return gl.load(sums_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _places(program, HELD: gl.constexpr):
    """Return the indices of a program's partial sum, [ROWS, 128], and the mask of its rows."""
    LAYOUT: gl.constexpr = accumulator_layout(128, 16)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, 128, gl.SliceLayout(0, LAYOUT))[None, :]
    return (program * HELD + row) * 128 + column, row < HELD
