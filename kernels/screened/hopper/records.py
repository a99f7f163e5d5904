"""Device code of the Hopper screen: records of tokens that may win.

This is screened.records for requests without bias, mask and soft cap, in the layout of the
accumulators. No data moves between threads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.noise.arithmetic import pieces
from fsbench.kernels.noise.contract import split_words
from fsbench.kernels.noise.keys import LOWEST_KEY
from fsbench.kernels.screened.lower_bounds import bound_of_word
from fsbench.kernels.screened.records import (
    bounds_of_words,
    lanes_below,
    lanes_left,
    list_tokens,
    reaching,
    record_of,
    store_record,
)
from fsbench.kernels.screened.score_bounds import larger


@gluon.constexpr_function
def _depth(ROWS, SPLIT):
    """Return how many records of a word are read at a time in the end, by registers of a thread."""
    return 4 if ROWS * SPLIT <= 64 else 1


@gluon.constexpr_function
def slots_of(SPLIT):
    """Return the neighboring words of a row, four of each thread."""
    return 16 * SPLIT


@gluon.constexpr_function
def word_layout(slots, ROWS, SPLIT):
    """Return the layout [ROWS, slots] of the words of rows.

    SPLIT: warpgroups that share the tokens, and so the slots, of a row.
    """
    slots_per_group = slots // SPLIT
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8]][: slots_per_group.bit_length() - 3],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0], [32, 0], [64, 0]][: (ROWS // 8).bit_length() - 1]
        + [[0, slots_per_group]][: SPLIT - 1],
        block_bases=[],
        shape=[ROWS, slots],
    )


@gluon.constexpr_function
def _record_layout(slots, ROWS, SPLIT):
    """Return the layout [ROWS, slots, depth]: word_layout with `depth` records of every word."""
    slots_per_group, depth = slots // SPLIT, _depth(ROWS, SPLIT)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2]][: depth.bit_length() - 1]
        + [[0, 4, 0], [0, 8, 0]][: slots_per_group.bit_length() - 3],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0], [32, 0, 0], [64, 0, 0]][: (ROWS // 8).bit_length() - 1]
        + [[0, slots_per_group, 0]][: SPLIT - 1],
        block_bases=[],
        shape=[ROWS, slots, depth],
    )


@gluon.jit
def leave_records(z, v0, vectors, rows, noise, bounds, limit, count, records, B, V,
                  NOISE: gl.constexpr, ROOM: gl.constexpr, ROWS: gl.constexpr,
                  SPLIT: gl.constexpr):  # fmt: skip
    """Record the words of z, fp32 [ROWS, WIDTH], that may win (screened.records.leave_records).

    The loop takes 64 columns at a time, or 128 if two warpgroups share them.
    records: int32 [ROWS] pointers to the rows' records.
    """
    SLOTS: gl.constexpr = slots_of(SPLIT)
    LAYOUT: gl.constexpr = word_layout(SLOTS, ROWS, SPLIT)
    word = gl.arange(0, SLOTS, gl.SliceLayout(0, LAYOUT))
    WIDTH: gl.constexpr = 4 * SLOTS
    slices = pieces(z, WIDTH)
    for i in gl.static_range(len(slices)):
        first = v0 + i * WIDTH
        z_of_lanes = ()
        of_slice = split_words(slices[i])
        for j in gl.static_range(len(of_slice)):
            z_of_lanes += (gl.convert_layout(of_slice[j], LAYOUT, assert_trivial=True),)  # type: ignore[assignment]
        upper, limit = bounds_of_words(
            z_of_lanes, None, first, vectors, None, rows, noise, bounds, None, word, limit, B, V,
            NOISE, True,
        )  # fmt: skip
        lanes = gl.where((rows < B)[:, None], reaching(upper, limit), 0)
        largest, record = record_of(upper, first, word, lanes)
        slot_ptrs = records[:, None] + ((word * (2 * ROOM))[None, :] + 2 * count)
        store_record(slot_ptrs, largest, record, (lanes != 0) & (count < ROOM), True)
        count += (lanes != 0).to(gl.int32)
    return limit, count


@gluon.jit
def list_remaining(rows, active, slots, fresh, records, lower_ptr, steps, listed_ptr, list_ptr,
                       B, V, ROOM: gl.constexpr, LIST: gl.constexpr, ROWS: gl.constexpr,
                       SPLIT: gl.constexpr):  # fmt: skip
    """Put the tokens of records that still reach the bound on the rows' lists.

    Every thread reads its records, a few at a time (screened.records.list_remaining).

    Args:
        rows: int32 [ROWS]. active: bool [ROWS], rows below B. slots: (limit, count), each
            [ROWS, SLOTS]. fresh: whether to read the rows' bounds again. records: pointers [ROWS].
    """
    SLOTS: gl.constexpr = slots[1].shape[1]
    DEPTH: gl.constexpr = _depth(ROWS, SPLIT)
    DEEP: gl.constexpr = _record_layout(SLOTS, ROWS, SPLIT)
    WORDS: gl.constexpr = gl.SliceLayout(2, DEEP)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, WORDS)
    limit, count = slots
    word = gl.load(lower_ptr + rows, mask=active & fresh, other=LOWEST_KEY, volatile=True)
    limit = larger(limit, bound_of_word(word, steps)[:, None])
    limit = gl.convert_layout(limit, WORDS, assert_trivial=True)[:, :, None]
    most = gl.max(gl.max(count, axis=1), axis=0)
    rows = gl.convert_layout(rows, OF_ROWS)
    count = gl.convert_layout(count, WORDS, assert_trivial=True)
    slot = gl.arange(0, SLOTS, gl.SliceLayout(0, WORDS))
    records = (
        gl.convert_layout(records, OF_ROWS)[:, None, None] + (slot * (2 * ROOM))[None, :, None]
    )
    active = (rows < B)[:, None]
    # More records than there was room for: the row is computed in full.
    to_list = listed_ptr + rows[:, None] + count * 0
    gl.atomic_add(to_list, count * 0 + (LIST + 1), mask=active & (count > ROOM), sem="relaxed")
    filled = gl.where(active, gl.minimum(count, ROOM), 0)[:, :, None]
    out = list_ptr + rows.to(gl.int64)[:, None, None] * LIST
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(1, DEEP)))[None, None, :]
    to_list = to_list[:, :, None] + depth * 0
    inside = lanes_below(V)
    for first in range(0, gl.minimum(most, ROOM), DEPTH):
        i = first + depth
        exists = i < filled
        upper = gl.load(records + 2 * i, mask=exists, other=0)
        record = gl.load(records + 2 * i + 1, mask=exists, other=0)
        lanes, tokens = lanes_left(upper, record, exists, limit, inside, V)
        to = gl.atomic_add(to_list, tokens, mask=tokens > 0, sem="relaxed")
        list_tokens(out, to, upper, record, lanes, B, LIST)
