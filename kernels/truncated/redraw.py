"""Device code of truncated sampling: top-p alone, by draws until one is kept.

A token is kept if the mass of the tokens before it is below p of the whole. That takes one pass
over the row, and no cutoff. Where the draw from all tokens is not kept, nothing from it on is: so
the tokens before it race, with token noise. The best of these is the best of the kept if it is one
of them, and if not, nothing from it on is kept either.

    sampling_before_kernel
        the mass before a row's token, and whether it stands; for all rows, then for the others
    sampling_redraw_kernel
        the tokens before a row's token race; the winner is its token then
    sampling_redraw_rest_kernel
        one program does what is left of a row

A row is cut into blocks, and the programs of a launch share the blocks of the rows that it is for.
Masses of blocks are stored, and the last program of a row to arrive adds them up. They are integers
as in truncated.cutoff, in parts of the mass of the block's largest logit, so that it does not
matter in which order, by which kernel or by how many programs they are added up.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fsbench.kernels.device.reaching import INTERPRETED
from fsbench.kernels.device.rows import noise_of_rows, of_row
from fsbench.kernels.noise.arithmetic import LOG2_E
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.keys import LOWEST_KEY, ordered_key, token_of_key
from fsbench.kernels.noise.words import split_words
from fsbench.kernels.truncated.cutoff import MASS_UNITS
from fsbench.kernels.truncated.plan import assigned
from fsbench.kernels.truncated.race import RUN, load_runs, race

BLOCK = tl.constexpr(2048)
"""Tokens of a block."""

BLOCKS_AT_ONCE = tl.constexpr(128)
"""Blocks whose sums are added up at once."""

REST = tl.constexpr(4)
"""Blocks that a program reads at once which does a row alone."""


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
    """Sums of four neighbours in MASS_UNITS: fp32 [N, BLOCK] -> int64 [N, BLOCK / 4].

    In this order and no other, and a fourth of the integers to make.
    """
    even, odd = tl.split(mass.reshape(mass.shape[0], mass.shape[1] // 2, 2))
    low, high = tl.split((even + odd).reshape(mass.shape[0], mass.shape[1] // 4, 2))
    return ((low + high) * MASS_UNITS).to(tl.int64)


@triton.jit
def _store_masses(logits_ptr, block, token, y, sharpness, largest_ptr, masses_ptr, blocks, stride):
    """Of blocks, int32 [N], store the largest logit, the mass, and the mass before a token.

    token, y: it, and its logit. masses_ptr: int64 [blocks, 2].
    """
    member = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    other = tl.load(logits_ptr + member, mask=member < stride, other=float("-inf"))
    largest = tl.max(other, axis=1)
    finite = tl.where(largest > float("-inf"), largest, 0.0)
    mass = tl.exp2(sharpness * (other - finite[:, None]))
    before = (other > y) | ((other == y) & (member < token))
    whole, part = _two_sums(_units_of_four(mass), _units_of_four(tl.where(before, mass, 0.0)), 1)
    there = block < blocks
    tl.store(largest_ptr + block, largest, mask=there)
    tl.store(masses_ptr + block * 2, whole, mask=there)
    tl.store(masses_ptr + block * 2 + 1, part, mask=there)


@triton.jit
def _in_units(mass, distance, sharpness):
    """Masses of blocks, in parts of the mass of a logit that is `distance` above their largest."""
    return (mass.to(tl.float32) * tl.exp2(-sharpness * distance)).to(tl.int64)


@triton.jit
def _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks):
    """Whether the mass before the token that _store_masses was told is p of the whole, or more."""
    some = tl.arange(0, BLOCKS_AT_ONCE)
    top = tl.full((BLOCKS_AT_ONCE,), float("-inf"), tl.float32)
    for first in tl.range(0, blocks, BLOCKS_AT_ONCE):
        there = first + some < blocks
        largest = tl.load(largest_ptr + first + some, mask=there, other=float("-inf"),
                          cache_modifier=".cg")  # fmt: skip
        top = tl.maximum(top, largest)
    top = tl.max(top)
    whole = tl.zeros((BLOCKS_AT_ONCE,), tl.int64)
    part = tl.zeros((BLOCKS_AT_ONCE,), tl.int64)
    for first in tl.range(0, blocks, BLOCKS_AT_ONCE):
        block = first + some
        there = block < blocks
        largest = tl.load(largest_ptr + block, mask=there, other=float("-inf"),
                          cache_modifier=".cg")  # fmt: skip
        at = masses_ptr + block * 2
        mass = tl.load(at, mask=there, other=0, cache_modifier=".cg")
        before = tl.load(at + 1, mask=there, other=0, cache_modifier=".cg")
        # Of a block without a finite logit the mass is 0, and so is what is added here.
        distance = tl.minimum(top - largest, 3e38)
        whole += _in_units(mass, distance, sharpness)
        part += _in_units(before, distance, sharpness)
    total, before_it = _two_sums(whole, part, 0)
    # With a p of 0 or below the first token is kept.
    return before_it.to(tl.float32) >= tl.maximum(p * total.to(tl.float32), 1.0)


@triton.jit
def _let_follow():
    """Let the next launch begin, which will wait; wait for all that the last one has written."""
    gdc_launch_dependents()
    gdc_wait()


@triton.jit
def _undecided(undecided_ptr, turn, B, ROWS: tl.constexpr):
    """Which rows a turn is for, int1 [ROWS]."""
    row = tl.arange(0, ROWS)
    return tl.load(undecided_ptr + turn * B + row, mask=row < B, other=0) != 0


@triton.jit(do_not_specialize=["turn", "turns", "B", "blocks"])
def sampling_before_kernel(
    logits_ptr,  # [B, stride] fp32
    temperature,  # fp32, or pointer to [B] fp32; so is top_p
    top_p,
    largest_ptr,  # [B, blocks] fp32, scratch
    masses_ptr,  # [B, blocks, 2] int64, scratch: see _store_masses
    arrivals_ptr,  # [B] int32, 0 between launches
    undecided_ptr,  # [turns, B] int32: rows that a turn is for; this one writes those behind it
    tokens_ptr,  # [B] int64; out: -1 where top_p is NaN
    valid_ptr,  # [B] bool, out
    turn,
    turns,
    B,
    stride,
    blocks,
    ROWS: tl.constexpr,  # a power of two, at least B
    FIRST: tl.constexpr,  # turn 0: it is for all rows
    TEMPERATURE_PER_ROW: tl.constexpr,
    TOP_P_PER_ROW: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the launch before it has ended
):
    if EARLY:
        _let_follow()
    if FIRST:
        row = tl.program_id(0) % B
        share = tl.program_id(0) // B
        programs = tl.num_programs(0) // B
    else:
        row, share, programs = assigned(_undecided(undecided_ptr, turn - 1, B, ROWS))
    if share < programs:
        token = tl.load(tokens_ptr + row).to(tl.int32)
        T = of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW)
        p = of_row(top_p, row, tl.float32, TOP_P_PER_ROW)
        T, inverse_temperature = temperatures(T)
        undecided_ptr += row
        looked_at = (token >= 0) & (T > 0.0) & (p < 1.0)
        if looked_at:
            logits_ptr += row.to(tl.int64) * stride
            largest_ptr += row * blocks
            masses_ptr += row * blocks * 2
            y = tl.load(logits_ptr + token)
            sharpness = inverse_temperature * LOG2_E
            for block in tl.range(share, blocks, programs):
                _store_masses(
                    logits_ptr, block + tl.arange(0, 1), token, y, sharpness, largest_ptr,
                    masses_ptr, blocks, stride,
                )  # fmt: skip
            tl.debug_barrier()
            if tl.atomic_add(arrivals_ptr + row, 1) == programs - 1:
                tl.atomic_xchg(arrivals_ptr + row, 0)
                again = _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks).to(tl.int32)
                for later in tl.range(turn, turns):
                    tl.store(undecided_ptr + later * B, again)
        else:
            if share == 0:
                for later in tl.range(turn, turns):
                    tl.store(undecided_ptr + later * B, 0)
                if p != p:
                    tl.store(tokens_ptr + row, -1)
                    tl.store(valid_ptr + row, False)


@triton.jit(do_not_specialize=["turn", "B", "blocks"])
def sampling_redraw_kernel(
    logits_ptr,  # [B, stride] fp32
    temperature,  # fp32, or pointer to [B] fp32
    keys_ptr,  # [B] int64, LOWEST_KEY between launches
    arrivals_ptr,  # [B] int32, 0 between launches
    undecided_ptr,  # [turns, B] int32
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    tokens_ptr,  # [B] int64; out: the winners
    turn,
    B,
    stride,
    blocks,
    ROWS: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    EARLY: tl.constexpr,
):
    RUNS: tl.constexpr = BLOCK // RUN
    if EARLY:
        _let_follow()
    row, share, programs = assigned(_undecided(undecided_ptr, turn, B, ROWS))
    if share < programs:
        logits_ptr += row.to(tl.int64) * stride
        seed, offset, number = noise_of_rows(
            seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
        )
        T = of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW)
        T, _inverse = temperatures(T)
        first = _first_before(logits_ptr, tokens_ptr + row)
        best = tl.full((RUNS, RUN // 4), LOWEST_KEY, tl.int64)
        for block in tl.range(share, blocks, programs):
            y, word = load_runs(logits_ptr, block, stride, RUNS)
            more = race(split_words(y), word, first, T, seed, offset, number)
            best = tl.maximum(best, more)
        found = tl.max(tl.max(best, axis=1), axis=0)
        if found > LOWEST_KEY:
            tl.atomic_max(keys_ptr + row, found)
        tl.debug_barrier()
        if tl.atomic_add(arrivals_ptr + row, 1) == programs - 1:
            tl.atomic_xchg(arrivals_ptr + row, 0)
            winner = tl.atomic_xchg(keys_ptr + row, LOWEST_KEY)
            tl.store(tokens_ptr + row, token_of_key(winner).to(tl.int64))


@triton.jit
def _first_before(logits_ptr, token_ptr):
    """The lowest key above that of a row's token."""
    token = tl.load(token_ptr).to(tl.int32)
    return ordered_key(tl.load(logits_ptr + token), token) + 1


@triton.jit(do_not_specialize=["turn", "B", "blocks"])
def sampling_redraw_rest_kernel(
    logits_ptr,  # [B, stride] fp32
    temperature,  # fp32, or pointer to [B] fp32; so is top_p
    top_p,
    largest_ptr,  # [B, blocks] fp32, scratch
    masses_ptr,  # [B, blocks, 2] int64, scratch: see _store_masses
    undecided_ptr,  # [turns, B] int32
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    tokens_ptr,  # [B] int64, out
    turn,
    B,
    stride,
    blocks,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    TOP_P_PER_ROW: tl.constexpr,
    EARLY: tl.constexpr,
):
    RUNS: tl.constexpr = REST * BLOCK // RUN
    if EARLY:
        _let_follow()
    row = tl.program_id(0)
    if tl.load(undecided_ptr + turn * B + row) != 0:
        logits_ptr += row.to(tl.int64) * stride
        largest_ptr += row * blocks
        masses_ptr += row * blocks * 2
        seed, offset, number = noise_of_rows(
            seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
        )
        T = of_row(temperature, row, tl.float32, TEMPERATURE_PER_ROW)
        T, inverse_temperature = temperatures(T)
        sharpness = inverse_temperature * LOG2_E
        p = of_row(top_p, row, tl.float32, TOP_P_PER_ROW)
        token = tl.load(tokens_ptr + row).to(tl.int32)
        again = token >= 0
        while again:
            first = ordered_key(tl.load(logits_ptr + token), token) + 1
            best = tl.full((RUNS, RUN // 4), LOWEST_KEY, tl.int64)
            for chunk in tl.range(0, tl.cdiv(stride, REST * BLOCK)):
                y, word = load_runs(logits_ptr, chunk, stride, RUNS)
                more = race(split_words(y), word, first, T, seed, offset, number)
                best = tl.maximum(best, more)
            token = token_of_key(tl.max(tl.max(best, axis=1), axis=0))
            y = tl.load(logits_ptr + token)
            for start in tl.range(0, blocks, REST):
                _store_masses(
                    logits_ptr, start + tl.arange(0, REST), token, y, sharpness, largest_ptr,
                    masses_ptr, blocks, stride,
                )  # fmt: skip
            tl.debug_barrier()
            again = _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks)
            tl.debug_barrier()
        tl.store(tokens_ptr + row, token.to(tl.int64))
