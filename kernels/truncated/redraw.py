"""Device code of truncated sampling: top-p without top-k, by draws until one is kept.

A token is kept if the mass of the tokens before it is below p of the whole. That takes one pass
over the row, and no cutoff. Where the draw from all tokens is not kept, nothing from it on is: so
the tokens before it race, with token noise. The best of these is the best of the kept if it is one
of them, and if not, nothing from it on is kept either. With min-p all that is of the tokens from
its threshold on, the mass, too; a draw below it is not kept.

    test_or_race
        a program's part of a test or of a race, for kernels of many programs
    sampling_redraw_kernel
        these, for top-p alone that is one number for all rows. Rows with numbers of their own have
        a plan (truncated.narrow)

A row is cut into blocks, and the programs of a launch share the blocks of the rows that it is for.
Masses of blocks are stored, and the last program of a row to arrive adds them up. They are integers
as in truncated.cutoff, in parts of the mass of the block's largest logit, so that it does not
matter in which order, by which kernel or by how many programs they are added up. In the last launch
that program goes on by itself until a token is kept, which it rarely needs to.
"""

import triton
import triton.language as tl

from fsbench.kernels.device.reaching import INTERPRETED
from fsbench.kernels.device.rows import noise_of_rows, of_row
from fsbench.kernels.noise.arithmetic import LOG2_E
from fsbench.kernels.noise.contract import temperatures
from fsbench.kernels.noise.keys import LOWEST, LOWEST_KEY, ordered, ordered_key, token_of_key
from fsbench.kernels.noise.words import split_words
from fsbench.kernels.truncated.cutoff import MASS_UNITS, first_key
from fsbench.kernels.truncated.plan import assigned, let_follow, mass_wanted
from fsbench.kernels.truncated.race import RUN, load_runs, race

BLOCK = tl.constexpr(2048)
"""Tokens of a block."""

BLOCKS_AT_ONCE = tl.constexpr(128)
"""Blocks whose sums are added up at once."""

LEAST = tl.constexpr(0.25)
"""Below this p a search for the cutoff is faster. It is taken for any number of rows, as sums are
rounded in other places there, and tokens must not depend on the batch."""

LEAST_OF_ROWS = tl.constexpr(0.8)
"""The same where rows have a plan, and so no more than three tests."""


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
    """Sums of four neighbors in MASS_UNITS: fp32 [N, BLOCK] -> int64 [N, BLOCK / 4].

    In this order and no other, and a fourth of the integers to make.
    """
    even, odd = tl.split(mass.reshape(mass.shape[0], mass.shape[1] // 2, 2))
    low, high = tl.split((even + odd).reshape(mass.shape[0], mass.shape[1] // 4, 2))
    return ((low + high) * MASS_UNITS).to(tl.int64)


@triton.jit
def _store_masses(
    logits_ptr, block, token, y, low, sharpness, largest_ptr, masses_ptr, blocks, stride
):  # fmt: skip
    """Of a block store the largest logit, the mass, and the mass before a token.

    token, y: it, and its logit. low: `ordered`, what is below has no mass.
    masses_ptr: int64 [blocks, 2].
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
def _race_of_block(logits_ptr, block, first, T, seed, offset, number, stride):
    """The best candidates of a block among the keys from `first` on."""
    y, word = load_runs(logits_ptr, block, stride, BLOCK // RUN)
    return race(split_words(y), word, first, T, seed, offset, number)


@triton.jit
def test_or_race(
    logits_ptr,  # of the row, like all that follow
    largest_ptr,  # [blocks] fp32, scratch
    masses_ptr,  # [blocks, 2] int64, scratch: see _store_masses
    best_ptr,  # int64, LOWEST_KEY between launches
    arrivals_ptr,  # an integer, 0 between launches
    token_ptr,  # int64: the row's token, -1 if it has none; out: the winner of a race
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
    RACE: tl.constexpr,  # the tokens before the row's race; else that is tested
    LAST: tl.constexpr,  # a test, and the last program to arrive goes on until a token is kept
):
    """(whether this program was the last of its row to arrive, whether the row has no token yet).

    share: of the row's programs, this one's number.
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
        found = tl.max(tl.max(best, axis=1), axis=0)
        if found > LOWEST_KEY:
            tl.atomic_max(best_ptr, found)
    else:
        for block in tl.range(share, blocks, programs):
            _store_masses(
                logits_ptr, block, token, y, low, sharpness, largest_ptr, masses_ptr, blocks, stride
            )
    tl.debug_barrier()
    last = tl.atomic_add(arrivals_ptr, 1) == programs - 1
    again = last
    if last:
        tl.atomic_xchg(arrivals_ptr, 0)
        if RACE:
            winner = token_of_key(tl.atomic_xchg(best_ptr, LOWEST_KEY))
            tl.store(token_ptr, winner.to(tl.int64))
            tl.store(valid_ptr, winner >= 0)
        else:
            # Of a token below `low` all the mass is before it.
            again = _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks)
            if LAST:
                if again:
                    token = _first_kept(
                        logits_ptr, largest_ptr, masses_ptr, token, low, p, sharpness, T, seed,
                        offset, number, blocks, stride,
                    )  # fmt: skip
                    tl.store(token_ptr, token.to(tl.int64))
                    tl.store(valid_ptr, token >= 0)
                again = programs < 0
    return last, again


@triton.jit
def _first_kept(logits_ptr, largest_ptr, masses_ptr, token, low, p, sharpness, T, seed, offset,
                number, blocks, stride):  # fmt: skip
    """Races and tests of one program, from a token that is not kept to one that is."""
    again = blocks > 0
    while again:
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
        again = _is_cut_off(largest_ptr, masses_ptr, p, sharpness, blocks)
    return token


@triton.jit
def _undecided(undecided_ptr, turn, B, ROWS: tl.constexpr):
    """Which rows a turn is for, int1 [ROWS]."""
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
    undecided_ptr,  # [turns, B] int32: rows that the launch after a turn is for; out by tests
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
    FIRST: tl.constexpr,  # turn 0: it is for all rows
    RACE: tl.constexpr,  # see test_or_race
    LAST: tl.constexpr,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    EARLY: tl.constexpr,  # launched before the launch before it has ended
):
    if EARLY:
        let_follow()
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
        again = share < 0
        if (tl.load(tokens_ptr + row) >= 0) & (T > 0.0):
            seed, offset, number = noise_of_rows(
                seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
            )
            last, again = test_or_race(
                logits_ptr + row.to(tl.int64) * stride, largest_ptr + row * blocks,
                masses_ptr + row * blocks * 2, keys_ptr + row, arrivals_ptr + row,
                tokens_ptr + row, valid_ptr + row, tl.full((), LOWEST, tl.int32),
                mass_wanted(top_p), inverse_temperature * LOG2_E, T, seed, offset, number, share,
                programs, blocks, stride, RACE, LAST,
            )  # fmt: skip
        if last:  # of a race, for the next test: what is there already
            for later in tl.range(turn, turns):
                tl.store(undecided_ptr + later * B + row, again.to(tl.int32))
