"""Device code of the screen for Hopper: both ends of every score, and records of what may win.

The same as screened.records, for requests without bias, mask and soft cap, in the layout of the
accumulators: every thread works on its own.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fsbench.kernels.noise.arithmetic import halves, nan_max
from fsbench.kernels.noise.words import first_of_word, random_words, split_words
from fsbench.kernels.screened.records import (
    bound_of_key,
    lanes_below,
    lanes_inside,
    larger,
    reaching,
    rough_gumbel,
    store_record,
)

SLOTS = gl.constexpr(16)
"""Words of a row side by side: four of each thread."""
DEPTH = gl.constexpr(4)
"""Records of a word that are looked at together in the end."""


@gluon.constexpr_function
def word_layout():
    """[32, SLOTS]: where a thread has the words of its row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 4], [0, 8]],
        lane_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 16],
    )


@gluon.constexpr_function
def _record_layout():
    """[32, SLOTS, DEPTH]: as word_layout, with DEPTH records of every word in its thread."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [0, 0, 2], [0, 4, 0], [0, 8, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[8, 0, 0], [16, 0, 0]],
        block_bases=[],
        shape=[32, 16, 4],
    )


@gluon.jit
def _ends(z, tokens, vectors, V, extra, reach, spread, T, noise):
    """(lower, upper) of scores, of plain requests. See screened.records._ends."""
    scale_ptr, residual_ptr, norm_ptr = vectors
    inside = tokens < V
    y = z * gl.load(scale_ptr + tokens, mask=inside, other=1.0)
    residual = gl.load(residual_ptr + tokens, mask=inside, other=0.0)
    norm = gl.load(norm_ptr + tokens, mask=inside, other=0.0)
    bound = residual * reach + (norm * spread + extra)
    score = y + T * noise
    return score - bound, score + bound


@gluon.jit
def leave_records(z, v0, vectors, rows, noise, bounds, limit, count, mine, B, V,
           NOISE: gl.constexpr, ROOM: gl.constexpr):  # fmt: skip
    """Leaves records of z, fp32 [32, WIDTH], 4 SLOTS columns at a time. See screened.records."""
    WIDTH: gl.constexpr = z.shape[1]
    if WIDTH > 4 * SLOTS:
        low, high = halves(z)
        limit, count = leave_records(
            low, v0, vectors, rows, noise, bounds, limit, count, mine, B, V, NOISE, ROOM
        )
        return leave_records(
            high, v0 + WIDTH // 2, vectors, rows, noise, bounds, limit, count, mine, B, V, NOISE,
            ROOM,
        )  # fmt: skip
    else:
        LAYOUT: gl.constexpr = word_layout()
        row, seed, offset = noise
        T, extra, reach, spread = bounds
        word = gl.arange(0, SLOTS, gl.SliceLayout(0, LAYOUT))
        first = first_of_word(v0, word)[None, :]
        w0, w1, w2, w3 = split_words(z)
        z0 = gl.convert_layout(w0, LAYOUT, assert_trivial=True)
        z1 = gl.convert_layout(w1, LAYOUT, assert_trivial=True)
        z2 = gl.convert_layout(w2, LAYOUT, assert_trivial=True)
        z3 = gl.convert_layout(w3, LAYOUT, assert_trivial=True)
        g0 = 0.0
        g1 = 0.0
        g2 = 0.0
        g3 = 0.0
        if NOISE == "token":
            zero = (limit != limit).to(gl.int32)
            r0, r1, r2, r3 = random_words(v0, word, row, seed, offset, 0, zero)
            g0 = rough_gumbel(r0, True)
            g1 = rough_gumbel(r1, True)
            g2 = rough_gumbel(r2, True)
            g3 = rough_gumbel(r3, True)
        l0, u0 = _ends(z0, first, vectors, V, extra, reach, spread, T, g0)
        l1, u1 = _ends(z1, first + 1, vectors, V, extra, reach, spread, T, g1)
        l2, u2 = _ends(z2, first + 8, vectors, V, extra, reach, spread, T, g2)
        l3, u3 = _ends(z3, first + 9, vectors, V, extra, reach, spread, T, g3)
        limit = larger(limit, larger(larger(l0, l1), larger(l2, l3)))
        lanes = gl.where((rows < B)[:, None], reaching(u0, u1, u2, u3, limit), 0)
        upper = nan_max(nan_max(u0, u1), nan_max(u2, u3))
        record = (((v0 >> 4) * 4 + word)[None, :] << 4) | lanes
        place = (gl.arange(0, SLOTS, gl.SliceLayout(0, LAYOUT)) * (2 * ROOM))[None, :]
        at = mine[:, None] + (place + 2 * count)
        store_record(at, upper, record, (lanes != 0) & (count < ROOM), True)
        return limit, count + (lanes != 0).to(gl.int32)


@gluon.jit
def list_what_is_left(rows, there, count, mine, lower_ptr, listed_ptr, list_ptr, B, V,
                       ROOM: gl.constexpr, LIST: gl.constexpr):  # fmt: skip
    """Lists what is left: every thread looks at its own records, DEPTH at a time.

    See screened.records.list_what_is_left.

    Args:
        rows, there: [32]. count: [32, SLOTS]. mine: pointers to the rows' records, [32].
    """
    DEEP: gl.constexpr = _record_layout()
    WORDS: gl.constexpr = gl.SliceLayout(2, DEEP)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, WORDS)
    key = gl.load(lower_ptr + rows, mask=there, other=0, volatile=True)
    limit = gl.convert_layout(bound_of_key(key), OF_ROWS)[:, None, None]
    most = gl.max(gl.max(count, axis=1), axis=0)
    rows = gl.convert_layout(rows, OF_ROWS)
    count = gl.convert_layout(count, WORDS, assert_trivial=True)
    slot = gl.arange(0, SLOTS, gl.SliceLayout(0, WORDS))
    mine = gl.convert_layout(mine, OF_ROWS)[:, None, None] + (slot * (2 * ROOM))[None, :, None]
    there = (rows < B)[:, None]
    # More records than there was room for: the row is computed in full.
    to_list = listed_ptr + rows[:, None] + count * 0
    gl.atomic_add(to_list, count * 0 + (LIST + 1), mask=there & (count > ROOM), sem="relaxed")
    filled = gl.where(there, gl.minimum(count, ROOM), 0)[:, :, None]
    out = list_ptr + rows.to(gl.int64)[:, None, None] * LIST
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, gl.SliceLayout(1, DEEP)))[None, None, :]
    to_list = to_list[:, :, None] + depth * 0
    inside = lanes_below(V)
    for first in range(0, gl.minimum(most, ROOM), DEPTH):
        i = first + depth
        known = i < filled
        upper = gl.load(mine + 2 * i, mask=known, other=0)
        record = gl.load(mine + 2 * i + 1, mask=known, other=0)
        below = upper.to(gl.float32, bitcast=True) < limit
        lanes = gl.where(known & (below == 0), lanes_inside(record, inside, V), 0)
        tokens = (lanes & 1) + ((lanes >> 1) & 1) + ((lanes >> 2) & 1) + (lanes >> 3)
        to = gl.atomic_add(to_list, tokens, mask=tokens > 0, sem="relaxed")
        word = record >> 4
        token = first_of_word(0, word)
        for lane in gl.static_range(4):
            fits = (((lanes >> lane) & 1) != 0) & (to < LIST)
            gl.store(out + to, upper, mask=fits)
            of_lane = token + (lane & 1) + (lane >> 1) * 8
            gl.store(out + to + B.to(gl.int64) * LIST, of_lane, mask=fits)
            to += (lanes >> lane) & 1
