"""Device code of the screen: records of tokens that may win.

A record is about a Philox word of four tokens: their largest upper bound, and which of them may
win. A thread keeps records of its words of a row, and the largest lower bound that it has seen.
Programs and ranks share these bounds (screened.lower_bounds).
"""

import triton
import triton.language as tl

from fsbench.kernels.device.epilogue import masked
from fsbench.kernels.noise.arithmetic import nan_max, pieces
from fsbench.kernels.noise.contract import first_of_word, random_words, split_words
from fsbench.kernels.screened.lower_bounds import bound_of_word
from fsbench.kernels.screened.score_bounds import known_logits, larger, rough_gumbel


@triton.jit
def leave_records(z, words, v0, vectors, rows, noise, bounds, soft_cap, row_bias_ptr, limit, count,
                  slot_ptrs, B, V, NOISE: tl.constexpr, ROOM: tl.constexpr,
                  NVIDIA: tl.constexpr):  # fmt: skip
    """Record the words of a tile [R, WIDTH] that may win.

    The loop takes one word of every slot [R, W] at a time, W neighboring words. A slot has its
    bound, its number of records and its memory for them, so threads need no synchronization.

    Args:
        words: of device.epilogue.allowed_words, or None.
        vectors: pointers (scale, residual, norm, (bias,) or ()).
        noise: (number in the noise, seed, offset) of the rows.
        bounds: (T, 1 / T, extra, reach, spread), [R, 1] each.
        slot_ptrs: int32 [R, W] pointers to the slots' records: (upper bound, word and lanes), one
            after the other.
        limit, count: [R, W]: the largest lower bound that the slot has seen, and the number of its
            records.

    Returns:
        (limit, count).
    """
    R: tl.constexpr = z.shape[0]
    SLICE: tl.constexpr = 4 * count.shape[1]
    slices = pieces(z, SLICE)
    row_biases = None
    if row_bias_ptr is not None:
        row_biases = row_bias_ptr + rows.to(tl.int64)[:, None] * V
    for i in tl.static_range(len(slices)):
        word = tl.arange(0, count.shape[1])
        z_of_lanes = split_words(slices[i])
        allowed = tl.where((rows < B)[:, None], 15, 0)
        if words is not None:
            of_slice = pieces(words, SLICE // 32)[i]
            m0, m1, m2, m3 = split_words(masked(tl.zeros((R, SLICE), tl.float32), of_slice))
            allowed &= _bits(m0 == 0.0, m1 == 0.0, m2 == 0.0, m3 == 0.0)
        upper, limit = bounds_of_words(
            z_of_lanes, None if words is None else allowed, v0 + i * SLICE, vectors, row_biases,
            rows, noise, bounds, soft_cap, word, limit, B, V, NOISE, NVIDIA,
        )  # fmt: skip
        lanes = allowed & reaching(upper, limit)
        largest, record = record_of(upper, v0 + i * SLICE, word, lanes)
        fits = (lanes != 0) & (count < ROOM)
        store_record(slot_ptrs + 2 * count, largest, record, fits, NVIDIA)
        count += (lanes != 0).to(tl.int32)
    return limit, count


@triton.jit
def bounds_of_words(z, allowed, v0, vectors, row_biases, rows, noise, bounds, soft_cap, word,
                    limit, B, V, NOISE: tl.constexpr, NVIDIA: tl.constexpr):  # fmt: skip
    """Return (upper bounds by lane, limit) of a word of every slot, [R, W] each.

    Args:
        z: four tensors [R, W], by lane. word: int32 [W], 0 .. W - 1.
        allowed: int32 [R, W], the lanes whose tokens may win, as bits; or None for all of them.
            Forbidden tokens do not raise the limit.
        others: as in leave_records.
    """
    row, seed, offset = noise
    temperature, _, _, _, _ = bounds
    first = first_of_word(v0, word)[None, :]
    gumbels = (0.0, 0.0, 0.0, 0.0)
    if NOISE == "token":
        # Always 0; ties the noise to the layout of z, and makes a word wait for the one before, as
        # in noise.contract.candidates. A bound is never NaN.
        zero = ((z[0] < float("-inf")) | (limit != limit)).to(tl.int32)
        bits = random_words(v0, word, row, seed, offset, 0, zero)
        gumbels = ()  # type: ignore[assignment]
        for lane in tl.static_range(4):
            gumbels = gumbels + (rough_gumbel(bits[lane], NVIDIA),)  # type: ignore[assignment]  # noqa: RUF005
    lower = ()
    upper = ()
    for lane in tl.static_range(4):
        y, bound = known_logits(
            z[lane], first + (lane % 2 + lane // 2 * 8), vectors, row_biases, rows, B, V, bounds,
            soft_cap,
        )  # fmt: skip
        score = y + temperature * gumbels[lane]
        lower = lower + (score - bound,)  # type: ignore[assignment]  # noqa: RUF005
        upper = upper + (score + bound,)  # type: ignore[assignment]  # noqa: RUF005
    l0, l1, l2, l3 = lower  # type: ignore[misc]
    if allowed is not None:
        l0 = tl.where((allowed & 1) != 0, l0, float("-inf"))
        l1 = tl.where((allowed & 2) != 0, l1, float("-inf"))
        l2 = tl.where((allowed & 4) != 0, l2, float("-inf"))
        l3 = tl.where((allowed & 8) != 0, l3, float("-inf"))
    return upper, larger(limit, larger(larger(l0, l1), larger(l2, l3)))


@triton.jit
def reaching(upper, least):
    """Return int32 bits: bit i is set where upper[i] is not below least."""
    u0, u1, u2, u3 = upper
    return _bits((u0 < least) == 0, (u1 < least) == 0, (u2 < least) == 0, (u3 < least) == 0)


@triton.jit
def _bits(b0, b1, b2, b3):
    low = b0.to(tl.int32) | (b1.to(tl.int32) << 1)
    return low | (b2.to(tl.int32) << 2) | (b3.to(tl.int32) << 3)


@triton.jit
def record_of(upper, v0, word, lanes):
    """Return (largest upper bound, the word's number << 4 | the lanes that may win)."""
    largest = nan_max(nan_max(upper[0], upper[1]), nan_max(upper[2], upper[3]))
    return largest, (((v0 >> 4) * 4 + word)[None, :] << 4) | lanes


@triton.jit
def store_record(ptrs, upper, record, stored, NVIDIA: tl.constexpr):
    """Store both words of a record at `ptrs`, where `stored`."""
    if NVIDIA:
        # tl.store would first move everything to another layout, by shared memory and barriers.
        tl.inline_asm_elementwise(
            """{
            .reg .pred p;
            setp.ne.s32 p, $4, 0;
            @p st.global.v2.b32 [$1], {$2, $3};
            mov.b32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [ptrs.to(tl.int64), upper.to(tl.int32, bitcast=True), record, stored.to(tl.int32)],
            tl.int32,
            False,
            1,
        )
    else:
        tl.store(ptrs, upper.to(tl.int32, bitcast=True), mask=stored)
        tl.store(ptrs + 1, record, mask=stored)


@triton.jit
def lanes_below(V):
    """Return which lanes of the words around token V are below it, four bits a word.

    The first four bits are for all words that end before V's 16 tokens, the next for the four words
    of these 16 tokens.
    """
    tail = V % 16
    lanes = 15
    for word in tl.static_range(4):
        first = 2 * word
        inside = _bits(first < tail, first + 1 < tail, first + 8 < tail, first + 9 < tail)
        lanes |= inside << (4 * word + 4)
    return lanes


@triton.jit
def lanes_inside(record, below, V):
    """Return the lanes of a record whose tokens are below V, as bits; below: lanes_below(V).

    A row without bounds has infinities, and 0 times infinity is NaN, which passes every comparison.
    So a record may have lanes of a tile's padding.
    """
    word = (record >> 4) - V // 16 * 4
    place = tl.minimum(tl.maximum(word, -1), 4) + 1
    return record & (below >> (4 * place)) & 15


@triton.jit
def list_remaining(rows, active, count, records, lower_ptr, steps, listed_ptr, list_ptr, B, V,
                       ROOM: tl.constexpr, LIST: tl.constexpr,
                       DEPTH: tl.constexpr):  # fmt: skip
    """Put the tokens of this program's records that still reach the bound on the rows' lists.

    The loop takes DEPTH records of every slot at a time. Tokens from V on are never listed.

    Args:
        rows: int32 [R]. active: bool [R], rows below B. records: pointers [R] to a row's records.
        count: int32 [R, slots]. lower_ptr, steps: as in lower_bounds.raise_bounds.
    """
    R: tl.constexpr = count.shape[0]
    SLOTS: tl.constexpr = count.shape[1]
    lower = tl.load(lower_ptr + rows, mask=active, other=0, volatile=True)
    limit = bound_of_word(lower, steps)[:, None]
    out = list_ptr + rows.to(tl.int64)[:, None] * LIST
    most = tl.max(count, axis=1)
    # More records than there was room for: the row is computed in full.
    tl.atomic_add(listed_ptr + rows, LIST + 1, mask=active & (most > ROOM), sem="relaxed")
    inside = lanes_below(V)
    place = tl.arange(0, SLOTS * DEPTH)[None, :]
    filled = tl.broadcast_to(count[:, :, None], (R, SLOTS, DEPTH)).reshape(R, SLOTS * DEPTH)
    for first in range(0, tl.minimum(tl.max(most, axis=0), ROOM), DEPTH):
        i = first + place % DEPTH
        ptrs = records[:, None] + 2 * (place // DEPTH * ROOM + i)
        exists = active[:, None] & (i < tl.minimum(filled, ROOM))
        upper = tl.load(ptrs, mask=exists, other=0)
        record = tl.load(ptrs + 1, mask=exists, other=0)
        lanes, tokens = lanes_left(upper, record, exists, limit, inside, V)
        number = tl.sum(tokens, axis=1)
        before = tl.atomic_add(listed_ptr + rows, number, mask=active & (number > 0), sem="relaxed")
        to = before[:, None] + tl.cumsum(tokens, axis=1) - tokens
        list_tokens(out, to, upper, record, lanes, B, LIST)


@triton.jit
def lanes_left(upper, record, exists, limit, inside, V):
    """Return (which lanes of records still reach the bound, as bits; the number of these lanes).

    exists: which records exist. limit: the bound. inside: lanes_below(V).
    """
    below = upper.to(tl.float32, bitcast=True) < limit
    lanes = tl.where(exists & (below == 0), lanes_inside(record, inside, V), 0)
    return lanes, (lanes & 1) + ((lanes >> 1) & 1) + ((lanes >> 2) & 1) + (lanes >> 3)


@triton.jit
def list_tokens(out, to, upper, record, lanes, B, LIST: tl.constexpr):
    """Put the tokens of records on the lists of their rows, from place `to` on.

    out: pointers to the rows' lists [2, B, LIST]. Tokens beyond LIST are left out.
    """
    token = first_of_word(0, record >> 4)
    for lane in tl.static_range(4):
        fits = (((lanes >> lane) & 1) != 0) & (to < LIST)
        tl.store(out + to, upper, mask=fits)
        of_lane = token + (lane & 1) + (lane >> 1) * 8
        tl.store(out + to + B.to(tl.int64) * LIST, of_lane, mask=fits)
        to += (lanes >> lane) & 1
