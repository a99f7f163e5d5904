"""Filter by top-p without top-k: draw until a token is kept.

A token is kept if the mass of the tokens before it is less than p of the row's mass. This test is
one pass over the row and needs no cutoff. If the draw from the whole vocabulary is not kept, no
token after it is kept, so the tokens before it race with token noise. The winner is tested next.
With min-p, only tokens from its threshold on count, and a draw below the threshold is not kept.

    test_or_race
        a program's part of a test or of a race
    sampling_redraw_kernel
        tests and races for one top-p of all rows. If filters differ by row, rows have a plan
        (truncated.search)

A row is divided into blocks, which programs share. The masses of blocks are stored, and the last
program of a row to arrive adds them up. They are integers, in parts of the mass of the block's
largest logit, so the sum depends on neither the order, nor the kernel, nor the number of programs.
In the last launch that program continues by itself until a token is kept; this is rare.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.device.rows import noise_of_rows, of_row
from fsbench.kernels.device.thresholds import INTERPRETED
from fsbench.kernels.launch.launch_cache import Launch, Scratch
from fsbench.kernels.launch.operands import per_row
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.noise.arithmetic import LOG2_E
from fsbench.kernels.noise.contract import split_words, temperatures
from fsbench.kernels.noise.keys import LOWEST, LOWEST_KEY, ordered, ordered_key, token_of_key
from fsbench.kernels.truncated.cutoff import MASS_UNITS, first_key
from fsbench.kernels.truncated.race import RUN, load_runs, race
from fsbench.kernels.truncated.row_plan import assigned, mass_wanted, pdl_options, wait_for_launch

BLOCK = tl.constexpr(2048)
"""Tokens of a block."""

BLOCKS_AT_ONCE = tl.constexpr(128)
"""Blocks whose sums are added up at once."""

LEAST = tl.constexpr(0.25)
"""The smallest p that is tested; below it a search for the cutoff is faster. The rule ignores the
number of rows: the search rounds its sums differently, and tokens must not depend on the batch."""

LEAST_OF_ROWS = tl.constexpr(0.8)
"""The smallest p that is tested in rows with a plan, which have at most three tests."""


@triton.jit
def _add_two(a1, a2, b1, b2):
    return a1 + b1, a2 + b2


@triton.jit
def _two_sums(a, b, axis: tl.constexpr):
    if INTERPRETED:  # which would add up pairs in Python, one by one
        return tl.sum(a, axis), tl.sum(b, axis)
    else:
        return tl.reduce((a, b), axis, _add_two)


@triton.jit
def _units_of_four(mass):
    """Add up four neighbors each, in MASS_UNITS: fp32 [N, BLOCK] -> int64 [N, BLOCK / 4].

    The order of the fp32 sums is fixed, and only a fourth of the numbers is converted.
    """
    even, odd = tl.split(mass.reshape(mass.shape[0], mass.shape[1] // 2, 2))
    low, high = tl.split((even + odd).reshape(mass.shape[0], mass.shape[1] // 4, 2))
    return ((low + high) * MASS_UNITS).to(tl.int64)


@triton.jit
def _store_masses(
    logits_ptr, block, token, y, low, sharpness, largest_ptr, masses_ptr, blocks, stride
):  # fmt: skip
    """Store a block's largest logit, its mass, and the mass before `token`.

    y: the token's logit. low: `ordered`, logits below it have no mass. masses_ptr: int64
    [blocks, 2].
    """
    block += tl.arange(0, 1)
    member = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    other = tl.load(logits_ptr + member, mask=member < stride, other=float("-inf"))
    largest = tl.max(other, axis=1)
    finite = tl.where(largest > float("-inf"), largest, 0.0)
    mass = tl.exp2(sharpness * (other - finite[:, None]))
    if low > LOWEST:
        mass = tl.where(ordered(other) >= low, mass, 0.0)
    before = (other > y) | ((other == y) & (member < token))
    whole, part = _two_sums(_units_of_four(mass), _units_of_four(tl.where(before, mass, 0.0)), 1)
    in_bounds = block < blocks
    tl.store(largest_ptr + block, largest, mask=in_bounds)
    tl.store(masses_ptr + block * 2, whole, mask=in_bounds)
    tl.store(masses_ptr + block * 2 + 1, part, mask=in_bounds)


@triton.jit
def _in_units(mass, distance, sharpness):
    """Convert masses to parts of the mass of a logit `distance` above the block's largest."""
    return (mass.to(tl.float32) * tl.exp2(-sharpness * distance)).to(tl.int64)


@triton.jit
def _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks):
    """Return whether the mass before the token of _store_masses is at least p of the row's mass."""
    lane = tl.arange(0, BLOCKS_AT_ONCE)
    top = tl.full((BLOCKS_AT_ONCE,), float("-inf"), tl.float32)
    for first in tl.range(0, blocks, BLOCKS_AT_ONCE):
        in_bounds = first + lane < blocks
        largest = tl.load(largest_ptr + first + lane, mask=in_bounds, other=float("-inf"),
                          cache_modifier=".cg")  # fmt: skip
        top = tl.maximum(top, largest)
    top = tl.max(top)
    whole = tl.zeros((BLOCKS_AT_ONCE,), tl.int64)
    part = tl.zeros((BLOCKS_AT_ONCE,), tl.int64)
    for first in tl.range(0, blocks, BLOCKS_AT_ONCE):
        block = first + lane
        in_bounds = block < blocks
        largest = tl.load(largest_ptr + block, mask=in_bounds, other=float("-inf"),
                          cache_modifier=".cg")  # fmt: skip
        mass_ptrs = masses_ptr + block * 2
        mass = tl.load(mass_ptrs, mask=in_bounds, other=0, cache_modifier=".cg")
        before = tl.load(mass_ptrs + 1, mask=in_bounds, other=0, cache_modifier=".cg")
        # A block without a finite logit has mass 0 and adds 0.
        distance = tl.minimum(top - largest, 3e38)
        whole += _in_units(mass, distance, sharpness)
        part += _in_units(before, distance, sharpness)
    total, before_it = _two_sums(whole, part, 0)
    # A p of 0 or below keeps the first token.
    return before_it.to(tl.float32) >= tl.maximum(p * total.to(tl.float32), 1.0)


@triton.jit
def _race_of_block(logits_ptr, block, first, T, seed, offset, number, stride):
    """Return the best candidates of a block among the keys from `first` on."""
    y, word = load_runs(logits_ptr, block, stride, BLOCK // RUN)
    return race(split_words(y), word, first, T, seed, offset, number)


@triton.jit
def test_or_race(
    logits_ptr,  # of the row, like all that follow
    largest_ptr,  # [blocks] fp32, scratch
    masses_ptr,  # [blocks, 2] int64, scratch: see _store_masses
    best_ptr,  # int64, LOWEST_KEY between launches
    arrivals_ptr,  # int32 or int64, 0 between launches
    token_ptr,  # int64: the row's token, -1: no token; out: the winner of a race
    valid_ptr,  # bool, out: stored with the token
    low,  # `ordered`: nothing below is kept
    p,
    sharpness,
    T,
    seed,
    offset,
    number,
    share,
    programs,
    blocks,
    stride,
    RACE: tl.constexpr,  # race the tokens before the row's token; else test that token
    LAST: tl.constexpr,  # test, and let the last program to arrive draw until a token is kept
):
    """Return (is this program the row's last to arrive, does the row need another draw).

    share: index of this program among the row's programs.
    """
    token = tl.load(token_ptr).to(tl.int32)
    # Without a token all tokens race, as if the last of the order had been drawn and cut off.
    y = tl.load(logits_ptr + token, mask=token >= 0, other=float("-inf"))
    if RACE:
        first = tl.maximum(ordered_key(y, token) + 1, first_key(low))
        best = tl.full((BLOCK // RUN, RUN // 4), LOWEST_KEY, tl.int64)
        for block in tl.range(share, blocks, programs):
            more = _race_of_block(logits_ptr, block, first, T, seed, offset, number, stride)
            best = tl.maximum(best, more)
        best_key = tl.max(tl.max(best, axis=1), axis=0)
        if best_key > LOWEST_KEY:
            tl.atomic_max(best_ptr, best_key)
    else:
        for block in tl.range(share, blocks, programs):
            _store_masses(
                logits_ptr, block, token, y, low, sharpness, largest_ptr, masses_ptr, blocks, stride
            )
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr, 1) == programs - 1
    redraw = last
    if last:
        tl.atomic_xchg(arrivals_ptr, 0)
        if RACE:
            winner = token_of_key(tl.atomic_xchg(best_ptr, LOWEST_KEY))
            tl.store(token_ptr, winner.to(tl.int64))
            tl.store(valid_ptr, winner >= 0)
        else:
            # All the mass is before a token below `low`.
            redraw = _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks)
            if LAST:
                if redraw:
                    token = _first_kept(
                        logits_ptr, largest_ptr, masses_ptr, token, low, p, sharpness, T, seed,
                        offset, number, blocks, stride,
                    )  # fmt: skip
                    tl.store(token_ptr, token.to(tl.int64))
                    tl.store(valid_ptr, token >= 0)
                redraw = programs < 0
    return last, redraw


@triton.jit
def _first_kept(logits_ptr, largest_ptr, masses_ptr, token, low, p, sharpness, T, seed, offset,
                number, blocks, stride):  # fmt: skip
    """Race and test in one program until a token is kept; return that token."""
    redraw = blocks > 0
    while redraw:
        y = tl.load(logits_ptr + token)
        first = tl.maximum(ordered_key(y, token) + 1, first_key(low))
        best = tl.full((BLOCK // RUN, RUN // 4), LOWEST_KEY, tl.int64)
        for block in tl.range(0, blocks):
            more = _race_of_block(logits_ptr, block, first, T, seed, offset, number, stride)
            best = tl.maximum(best, more)
        token = token_of_key(tl.max(tl.max(best, axis=1), axis=0))
        y = tl.load(logits_ptr + token)
        tl.debug_barrier()
        for block in tl.range(0, blocks):
            _store_masses(
                logits_ptr, block, token, y, low, sharpness, largest_ptr, masses_ptr, blocks, stride
            )
        tl.debug_barrier()
        redraw = _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks)
    return token


@triton.jit
def _undecided(undecided_ptr, turn, B, ROWS: tl.constexpr):
    """Load which rows a turn serves, int1 [ROWS]."""
    row = tl.arange(0, ROWS)
    return tl.load(undecided_ptr + turn * B + row, mask=row < B, other=0) != 0


@triton.jit(do_not_specialize=["turn", "turns", "B", "blocks"])
def sampling_redraw_kernel(
    logits_ptr,  # [B, stride] fp32
    temperature,  # fp32, or pointer to [B] fp32
    top_p,
    largest_ptr,  # [B, blocks] fp32, scratch
    masses_ptr,  # [B, blocks, 2] int64, scratch
    keys_ptr,  # [B] int64, LOWEST_KEY between launches
    arrivals_ptr,  # [B] int32, 0 between launches
    undecided_ptr,  # [turns, B] int32: rows that the launch after a turn serves; out by tests
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    tokens_ptr,  # [B] int64; out
    valid_ptr,  # [B] bool, out
    turn,
    turns,
    B,
    stride,
    blocks,
    ROWS: tl.constexpr,  # a power of two, at least B
    FIRST: tl.constexpr,  # turn 0 serves all rows
    RACE: tl.constexpr,  # see test_or_race
    LAST: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    USE_PDL: tl.constexpr,  # programmatic dependent launch
):
    if USE_PDL:
        wait_for_launch()
    if FIRST:
        row = tl.program_id(0) % B
        share = tl.program_id(0) // B
        programs = tl.num_programs(0) // B
    else:
        row, share, programs = assigned(_undecided(undecided_ptr, turn - 1, B, ROWS))
    if share < programs:
        T = of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW)
        T, inverse_temperature = temperatures(T)
        last = share == 0
        redraw = share < 0
        if (tl.load(tokens_ptr + row) >= 0) & (T > 0.0):
            seed, offset, number = noise_of_rows(
                seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
            )
            last, redraw = test_or_race(
                logits_ptr + row.to(tl.int64) * stride, largest_ptr + row * blocks,
                masses_ptr + row * blocks * 2, keys_ptr + row, arrivals_ptr + row,
                tokens_ptr + row, valid_ptr + row, tl.full((), LOWEST, tl.int32),
                mass_wanted(top_p), inverse_temperature * LOG2_E, T, seed, offset, number, share,
                programs, blocks, stride, RACE, LAST,
            )  # fmt: skip
        if last:
            for later in tl.range(turn, turns):
                tl.store(undecided_ptr + later * B + row, redraw.to(tl.int32))


PROGRAMS = {"test": 1320, "race": 900}
"""Programs of a launch: about as many as fit on a large GPU at once."""

WARPS = 4

UNFINISHED_ROWS = 0.02
"""Expected number of rows that one program each may finish."""


def is_alone(filters: Filters) -> bool:
    """Return whether top-p, one number from LEAST on for all rows, is the only filter."""
    top_k, top_p, min_p = filters
    if isinstance(top_k, Tensor) or isinstance(top_p, Tensor) or isinstance(min_p, Tensor):
        return False
    return top_k == 0 and min_p <= 0.0 and LEAST.value <= top_p < 1.0


def tests_needed(top_p: float, B: int) -> int:
    """Return the number of tests by many programs, before one program finishes a remaining row.

    Each race is among the tokens before the last token, so the mass before a row's token falls by a
    factor that is uniform in [0, 1]. The number of failed tests is therefore Poisson distributed
    with mean log(1 / p), and a row fails n tests with the probability of n events or more. A
    remaining row takes one program about a hundred microseconds.
    """
    events = -math.log(top_p)
    n, chance, fails = 1, top_p, 1.0 - top_p  # of no event; of n or more
    while n == 1 or B * fails > UNFINISHED_ROWS:
        chance *= events / n
        fails -= chance
        n += 1
    return n


def redraw_launches(
    request: Request, turns: int, B: int, stride: int
) -> tuple[list[Launch], Scratch]:
    """Return launches that replace tokens that top-p cuts off by kept ones, and their scratch.

    The tokens before are draws from the whole vocabulary.

    Args:
        turns: number of tests (tests_needed) and of the races between them; the tokens do not
            depend on it.
        stride: of the logits of StoredLogits.
    """
    blocks, device = -(-stride // BLOCK.value), request.hidden.device
    launches = []
    for turn in range(turns):
        is_race = turn % 2 == 1
        most = PROGRAMS["race" if is_race else "test"]
        # In the first turn all rows have equally many programs, at most one for each block.
        each = max(1, min(blocks, most // B))
        grid = (B * each if turn == 0 else max(B, min(B * blocks, most)),)
        fixed = {
            "turn": turn,
            "turns": turns,
            "B": B,
            "stride": stride,
            "blocks": blocks,
            "ROWS": max(32, 1 << (B - 1).bit_length()),
            "FIRST": turn == 0,
            "RACE": is_race,
            "LAST": turn == turns - 1,
            **per_row(request),
            "num_warps": WARPS,
            **pdl_options(device),
        }
        launches.append(Launch(sampling_redraw_kernel, grid, fixed))
    scratch = {
        "undecided_ptr": ((turns, B), torch.int32),
        "largest_ptr": ((B, blocks), torch.float32),
        "masses_ptr": ((B, blocks, 2), torch.int64),
    }
    return launches, scratch
