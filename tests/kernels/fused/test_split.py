"""Blocks of tokens that two programs share: who has which steps, and when."""

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
    """Of each program its pieces (block, first step, end), -1 beyond; of each block its program."""
    program = tl.program_id(0)
    share = (0, program, programs, 0, num_tokens)
    pieces = pieces_of(share, steps)
    at = out_ptr + program * MOST * 3
    for i in range(pieces[0]):
        block, first, end = piece(i, pieces, steps)
        tl.store(at + i * 3, block)
        tl.store(at + i * 3 + 1, first)
        tl.store(at + i * 3 + 2, end)
    for block in range(program, tl.cdiv(num_tokens, 128), programs):
        tl.store(source_ptr + block, program_of_block(block, num_tokens, programs, steps, 1))


def shares(blocks: int, programs: int, steps: int, short: int = 0) -> tuple[list, list[int]]:
    """(the pieces of each program, the program that has each block's logits)."""
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
    found = [[tuple(row) for row in rows if row[0] >= 0] for rows in out.tolist()]
    return found, source.tolist()


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_step_is_done_once_and_in_order(data):
    programs = data.draw(st.integers(1, 12))
    blocks = data.draw(st.integers(programs, programs * 5))
    steps = data.draw(st.integers(1, 9))
    found, source = shares(blocks, programs, steps, data.draw(st.integers(0, 127)))
    done = [0] * blocks
    owner = [-1] * blocks
    # What programs take first needs nobody; the rest in the order of the programs.
    for program, pieces in enumerate(found):
        assert len(pieces) == len({block for block, _, _ in pieces})
        for i, (block, first, end) in enumerate(pieces):
            assert 0 <= first < end <= steps
            if end < steps:  # left to the successor, before anything else
                assert i == 0 and first == 0
                assert found[program + 1][-1][:2] == (block, end)
            if first > 0:  # taken over from the predecessor, after everything else
                assert i == len(pieces) - 1 and end == steps
                assert found[program - 1][0] == (block, 0, first)
            if end == steps:
                owner[block] = program
            done[block] += end - first
    assert done == [steps] * blocks
    assert owner == source
    work = [sum(end - first for _, first, end in pieces) for pieces in found]
    assert max(work) - min(work) <= 1


def test_the_head_is_done_before_the_successor_wants_it():
    """If all programs keep the same pace: nobody waits."""
    for blocks, programs, steps in ((149, 132, 32), (385, 132, 24), (1002, 132, 64), (133, 132, 7)):
        found, _ = shares(blocks, programs, steps)
        for before, after in pairwise(found):
            block, first, _ = after[-1]
            if first > 0:
                assert before[0] == (block, 0, first)
                begun = sum(end - first for _, first, end in after[:-1])
                assert begun >= first - 1
