"""Split-K: the pieces of each program, and their order."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from fsbench.kernels.configs.gpu import launching_on
from fsbench.kernels.fused.hopper.split import piece, pieces_of, program_of_block

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter"
)

MOST = 16


@triton.jit
def shares_kernel(out_ptr, source_ptr, num_tokens, programs, steps, MOST: tl.constexpr):
    """Write the pieces (block, first step, end) of each program, and the program of each block."""
    program = tl.program_id(0)
    share = (0, program, programs, 0, num_tokens)
    pieces = pieces_of(share, steps)
    pointers = out_ptr + program * MOST * 3
    for i in range(pieces[0]):
        block, first, end = piece(i, pieces, steps)
        tl.store(pointers + i * 3, block)
        tl.store(pointers + i * 3 + 1, first)
        tl.store(pointers + i * 3 + 2, end)
    for block in range(program, tl.cdiv(num_tokens, 128), programs):
        tl.store(source_ptr + block, program_of_block(block, num_tokens, programs, steps, 1))


def shares(blocks: int, programs: int, steps: int, short: int = 0) -> tuple[list, list[int]]:
    """Return the pieces of each program, and the program that has each block's logits."""
    out = torch.full((programs, MOST, 3), -1, dtype=torch.int32)
    source = torch.full((blocks,), -1, dtype=torch.int32)
    with launching_on(out.device):
        shares_kernel[(programs,)](
            out_ptr=out,
            source_ptr=source,
            num_tokens=blocks * 128 - short,
            programs=programs,
            steps=steps,
            MOST=MOST,
        )
    pieces = [[tuple(row) for row in rows if row[0] >= 0] for rows in out.tolist()]
    return pieces, source.tolist()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_step_is_done_once_and_in_order(data):
    programs = data.draw(st.integers(1, 12))
    blocks = data.draw(st.integers(programs, programs * 5))
    steps = data.draw(st.integers(1, 9))
    shares_of_programs, source = shares(blocks, programs, steps, data.draw(st.integers(0, 127)))
    done = [0] * blocks
    owner = [-1] * blocks
    # The first piece of a program depends on no other; the last one on the previous program's.
    for program, pieces in enumerate(shares_of_programs):
        assert len(pieces) == len({block for block, _, _ in pieces})
        for i, (block, first, end) in enumerate(pieces):
            assert 0 <= first < end <= steps
            if end < steps:  # left to the successor, before anything else
                assert i == 0 and first == 0
                assert shares_of_programs[program + 1][-1][:2] == (block, end)
            if first > 0:  # taken over from the predecessor, after everything else
                assert i == len(pieces) - 1 and end == steps
                assert shares_of_programs[program - 1][0] == (block, 0, first)
            if end == steps:
                owner[block] = program
            done[block] += end - first
    assert done == [steps] * blocks
    assert owner == source
    work = [sum(end - first for _, first, end in pieces) for pieces in shares_of_programs]
    assert max(work) - min(work) <= 1


def test_a_partial_sum_is_stored_before_the_next_program_needs_it():
    """No program waits if all have the same speed."""
    for blocks, programs, steps in ((29, 25, 32), (73, 25, 24), (26, 25, 7)):
        shares_of_programs, _ = shares(blocks, programs, steps)
        for before, after in pairwise(shares_of_programs):
            block, first, _ = after[-1]
            if first > 0:
                assert before[0] == (block, 0, first)
                begun = sum(end - first for _, first, end in after[:-1])
                assert begun >= first - 1
