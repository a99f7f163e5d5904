"""Device code of group noise: one Gumbel per 32 tokens, and a draw inside the winning group.

By max-stability (FlashSampling, Lemma D.1) the largest y_i + T g_i of a group is distributed as
T (L + g), L the log-mass of the group, and the token that attains it is an independent draw from
the softmax of the group. So a group needs one Gumbel and one uniform instead of 32 Gumbels, and
the log-masses, from which log Z follows, are there anyway. `fsbench.reference` specifies it.

A group is what one thread of a tensor-core accumulator holds of an aligned block of 128 tokens:
{2q, 2q + 1} + 8j for j < 16. It depends on token ids alone and its sums run in the order of the
ids, so for equal logits the token does not depend on the tile.
"""

import triton
import triton.language as tl

from fsbench.kernels._helper import LOG2_E, _log, gumbel, nan_max, ordered_key

GROUP_STREAM = tl.constexpr(1 << 16)
"""Added to the sample's number in counter word 3: group noise shares no block with token noise."""


@triton.jit
def members(logits):
    """[R, WIDTH] of tokens from a multiple of 128 on -> 32 tensors [R, WIDTH // 32].

    The i-th holds member i of every group. Where a thread holds whole groups nothing moves.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    by_group = logits.reshape(R, WIDTH // 128, 16, 4, 2).permute(0, 1, 3, 2, 4)
    return _split(by_group.reshape(R, WIDTH // 32, 32))


@triton.jit
def _split(x):
    N: tl.constexpr = x.shape[2]
    if N == 2:
        first, second = x.split()
        return (first, second)
    else:
        low, high = x.reshape(x.shape[0], x.shape[1], 2, N // 2).permute(0, 1, 3, 2).split()
        return _split(low) + _split(high)


@triton.jit
def group_sums(y, inverse_temperature):
    """Members (32 tensors [R, G]) -> (m, sums): the largest, and the running sums of exp((y-m)/T).

    sums is a tuple of 32; the last is the mass of the group in units of exp(m / T). A group
    without a finite member has m = -inf and mass 0.
    """
    m = y[0]
    for i in tl.static_range(1, 32):
        m = nan_max(m, y[i])
    c = inverse_temperature * LOG2_E
    # Subtracted before scaling: c m would be rounded, and its error grows with m / T.
    finite = tl.where(m == float("-inf"), 0.0, m)
    total = tl.exp2(c * (y[0] - finite))
    sums = (total,)
    for i in tl.static_range(1, 32):
        total += tl.exp2(c * (y[i] - finite))
        sums = sums + (total,)  # noqa: RUF005 (Triton has no starred tuples)
    return m, sums


@triton.jit
def group_candidates(y, m, sums, v0, row, seed, offset, temperature, sample,
                     GREEDY_ROWS: tl.constexpr):  # fmt: skip
    """The packed candidate of every group, [R, G] int64, and its logit, [R, G] fp32.

    Args:
        y, m, sums: members and what group_sums made of them, at 1 / T (any 1 / T where T = 0).
        v0: the tile's first token, a multiple of 128. row: [R, 1] int32.
        seed, offset, temperature: scalars or [R, 1]. sample: int32 scalar.
        GREEDY_ROWS: temperature may be 0 in some rows: there the largest logit wins.
    """
    G: tl.constexpr = m.shape[1]
    # Always 0; ties the counters to the layout of the members, as in random_words.
    zero = (m < float("-inf")).to(tl.int32)
    index = tl.arange(0, G)[None, :]
    r0, r1, _, _ = tl.philox(
        seed,
        (v0 >> 5) + index + zero,
        row + zero,
        offset.to(tl.int32) + zero,
        zero + sample + GROUP_STREAM,
    )
    score = m + temperature * (_log(tl.maximum(sums[31], 1.0)) + gumbel(r0))
    # u has 24 bits, so u times the sum is below the sum, and some member is hit.
    u = (r1 >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08
    threshold = u * sums[31]
    largest = float("inf")
    if GREEDY_ROWS:
        threshold = tl.where(temperature == 0.0, float("inf"), threshold)
        largest = tl.where(temperature == 0.0, m, float("inf"))
    member = tl.full(m.shape, 31, tl.int32)
    logit = y[31]
    for i in tl.static_range(30, -1, -1):
        hit = sums[i] > threshold
        if GREEDY_ROWS:
            hit = hit | (y[i] >= largest)
        member = tl.where(hit, i, member)
        logit = tl.where(hit, y[i], logit)
    token = v0 + index // 4 * 128 + index % 4 * 2 + (member >> 1) * 8 + (member & 1)
    return ordered_key(tl.where(score == score, score, float("inf")), token), logit
