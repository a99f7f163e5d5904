"""Group noise: one Gumbel per 32 tokens, and a draw inside the winning group. Device code.

By max-stability (FlashSampling, Lemma D.1) the largest y_i + T g_i of a group is distributed as
T (L + g), where L is the log-mass of the group. The token that attains it is an independent draw
from the softmax of the group. So a group needs one Gumbel and one uniform instead of 32 Gumbels,
and its log-mass is also a term of log Z. `fsbench.reference` is the specification.

A group is the part of an aligned block of 128 tokens that one thread of a tensor-core accumulator
holds: {2q, 2q + 1} + 8j for j < 16. It depends on token ids alone, and its sums run in the order of
the ids. So for equal logits the token does not depend on the tile.

`best_token` draws with token noise from tokens that are in registers as the members of groups. A
word of token noise serves members 4i to 4i + 3 of a group.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import LOG2_E, log, nan_max
from fsbench.kernels.noise.contract import exponential, gumbel
from fsbench.kernels.noise.keys import ordered_key

SHARPEST = tl.constexpr(2.0**126)
"""1 / T in greedy rows: a member that is 2^-117 or more below the largest has no mass."""
SMALL = tl.constexpr(2.0**-60)
LARGE = tl.constexpr(2.0**100)
"""In greedy rows a group whose largest member is below SMALL is multiplied by LARGE: fp32 numbers
are at least 2^-149 apart, and at least 2^-84 if one of them is SMALL or more."""
GROUP_STREAM = tl.constexpr(1 << 16)
"""Added to the sample's number in counter word 3: group noise shares no block with token noise."""


@triton.jit
def members(logits):
    """Return 32 tensors [R, WIDTH // 32]; the i-th holds member i of every group.

    logits: [R, WIDTH] of tokens from a multiple of 128 on. No data moves where a thread holds
    whole groups.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    by_group = logits.reshape(R, WIDTH // 128, 16, 4, 2).permute(0, 1, 3, 2, 4)
    return split_last(by_group.reshape(R, WIDTH // 32, 32))


@triton.jit
def split_last(x):
    """Split [R, G, N] into N tensors [R, G]; N is a power of two."""
    N: tl.constexpr = x.shape[2]
    if N == 2:
        first, second = x.split()
        return (first, second)
    else:
        low, high = x.reshape(x.shape[0], x.shape[1], 2, N // 2).permute(0, 1, 3, 2).split()
        return split_last(low) + split_last(high)


@triton.jit
def largest_member(y):
    """Return the largest member of each group, NaN if a member is; y: tensors [R, G]."""
    m = y[0]
    for i in tl.static_range(1, len(y)):
        m = nan_max(m, y[i])
    return m


@triton.jit
def group_sums(y, inverse_temperature):
    """Return (m, sums): each group's largest member, and running sums of exp((y - m) / T).

    y and sums are tuples of tensors [R, G]. The last sum is the mass of the group in units of
    exp(m / T). A group without a finite member has m = -inf and mass 0.
    """
    m = largest_member(y)
    # m is subtracted before scaling: the rounding error of c m would grow with m / T.
    finite = tl.where(m == float("-inf"), 0.0, m)
    c = inverse_temperature * LOG2_E
    total = tl.exp2(c * (y[0] - finite))
    sums = (total,)
    for i in tl.static_range(1, len(y)):
        total += tl.exp2(c * (y[i] - finite))
        sums = sums + (total,)  # noqa: RUF005 (Triton has no starred tuples)
    return m, sums


@triton.jit
def drawing_sums(y, temperature, inverse_temperature, GREEDY_ROWS: tl.constexpr):
    """Return the `group_sums` from which members are drawn.

    Args:
        inverse_temperature: used in rows with T > 0.
        GREEDY_ROWS: temperature may be 0 in some rows. There the largest members have mass 1 and
            the others 0, however small the difference.
    """
    if not GREEDY_ROWS:
        return group_sums(y, inverse_temperature)
    else:
        m = largest_member(y)
        finite = tl.where(m == float("-inf"), 0.0, m)
        greedy = temperature == 0.0
        c = tl.where(greedy, SHARPEST, inverse_temperature) * LOG2_E
        # Numbers near 0 can differ too little for SHARPEST to remove the mass of the smaller one.
        # They are first scaled by a power of two, exactly; all others by 1, which changes no bit.
        scale = tl.where(greedy & (tl.abs(finite) < SMALL), LARGE, 1.0)
        shift = -(finite * scale)
        total = tl.exp2(c * tl.fma(y[0], scale, shift))
        sums = (total,)
        for i in tl.static_range(1, len(y)):
            total += tl.exp2(c * tl.fma(y[i], scale, shift))
            sums = sums + (total,)  # noqa: RUF005
        return m, sums


@triton.jit
def group_noise(v0, index, row, seed, offset, sample):
    """Return the noise of every group, [R, G]: (1 / E with E exponential, u uniform in [0, 1)).

    Args:
        v0: the tile's first token, a multiple of 128.
        index: int32 [1 or R, G], the group in the tile, 0 .. G - 1.
        row: int32 [R, 1 or G], the row in the noise.
        seed, offset: scalars or [R, 1 or G]. sample: int32 scalar.
    """
    zero = row * 0 + index * 0
    r0, r1, _, _ = tl.philox(
        seed,
        (v0 >> 5) + index + zero,
        row + zero,
        offset.to(tl.int32) + zero,
        zero + sample + GROUP_STREAM,
    )
    return 1.0 / exponential(r0), uniform(r1)


@triton.jit
def uniform(bits):
    """Map 32 random bits (uint32) to a number in [0, 1) of 24 bits."""
    return (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def group_draws(y, m, sums, rate, u, temperature, GREEDY_ROWS: tl.constexpr):
    """Return (score, member, logit of the member) of every group's draw, [R, G] each.

    The score is m + T (log mass + Gumbel), where the Gumbel is -log E.

    Args:
        y: the members. m, sums: the result of `drawing_sums`.
        rate, u: the result of `group_noise`. temperature: scalar or [R, 1 or G].
        GREEDY_ROWS: temperature may be 0 in some rows. There the first of the largest logits wins.
    """
    score = m + temperature * log(tl.maximum(sums[len(sums) - 1], 1.0) * rate)
    # u has 24 bits, so u times the sum is below the sum, and one of the members is drawn.
    threshold = u * sums[len(sums) - 1]
    if GREEDY_ROWS:
        threshold = tl.where(temperature == 0.0, 0.0, threshold)
    member, logit = _first_above(sums, threshold, y, (m < float("-inf")).to(tl.int32))
    return score, member, logit


@triton.jit
def _first_above(sums, threshold, y, first):
    """Return (first + i, y_i) of the first sum above the threshold, or of the last sum.

    The sums ascend, so the search halves the range.
    """
    HALF: tl.constexpr = len(sums) // 2
    if HALF == 0:
        return first, y[0]
    else:
        above = threshold >= sums[HALF - 1]
        half_sums = ()
        half_y = ()
        for i in tl.static_range(HALF):
            half_sums = half_sums + (tl.where(above, sums[HALF + i], sums[i]),)  # noqa: RUF005
            half_y = half_y + (tl.where(above, y[HALF + i], y[i]),)  # noqa: RUF005
        return _first_above(half_sums, threshold, half_y, first + tl.where(above, HALF, 0))


@triton.jit
def token_of_member(v0, index, member):
    """Return the token of a member (0 .. 31) of a group; index counts groups from token v0."""
    return v0 + index // 4 * 128 + index % 4 * 2 + (member >> 1) * 8 + (member & 1)


@triton.jit
def group_of_token(token):
    """Return the number of a token's group."""
    return (token >> 7) * 4 + ((token >> 1) & 3)


@triton.jit
def group_candidates(y, m, sums, v0, row, seed, offset, temperature, sample,
                     GREEDY_ROWS: tl.constexpr):  # fmt: skip
    """Return the packed candidate of every group, int64 [R, G], and its logit."""
    index = tl.arange(0, m.shape[1])[None, :]
    # Always 0. It ties the noise to the layout of the members, as in `candidates`.
    zero = (m < float("-inf")).to(tl.int32)
    rate, u = group_noise(v0, index + zero, row, seed, offset, sample)
    score, member, logit = group_draws(y, m, sums, rate, u, temperature, GREEDY_ROWS)
    score = tl.where(score == score, score, float("inf"))
    return ordered_key(score, token_of_member(v0, index, member)), logit


@triton.jit
def best_token(y, v0, index, row, seed, offset, temperature, sample):
    """Return the best of 32 tokens under token noise: (score, token, logit), [R, G] each.

    A score may be NaN. Of equal scores the lowest token wins.

    Args:
        y: 32 tensors [R, G], the result of `members`.
        v0, index, row, seed, offset, sample: as in `group_noise`.
        temperature: as in `group_draws`.
    """
    # Always 0. It ties the noise to the layout of the members.
    zero = (y[0] < float("-inf")).to(tl.int32)
    best = (zero.to(tl.float32) - float("inf"), zero, zero.to(tl.float32))
    for part in tl.static_range(8):
        # The aligned 128 tokens, a part of them, and pairs of columns in every eight of the part.
        block = ((v0 >> 7) + index // 4) * 32 + part * 4 + index % 4
        # Still 0. A block waits for the one before, which bounds live registers.
        zero |= (best[1] < 0).to(tl.int32)
        zeros = row * 0 + (block + zero) * 0
        words = tl.philox(
            seed, block + zero, row + zeros, offset.to(tl.int32) + zeros, zeros + sample
        )
        for i in tl.static_range(4):
            logit = y[part * 4 + i]
            score = logit + temperature * gumbel(words[i])
            best = better(best, (score, token_of_member(v0, index, part * 4 + i), logit))
    return best


@triton.jit
def better(best, other):
    """Return the one of two (score, token, logit) with the larger score; a NaN score stays.

    A thread visits its tokens in ascending order, so of equal scores the lowest token wins.
    """
    wins = other[0] > best[0]
    return (
        nan_max(best[0], other[0]),
        tl.where(wins, other[1], best[1]),
        tl.where(wins, other[2], best[2]),
    )
