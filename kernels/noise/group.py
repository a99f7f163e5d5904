"""Device code of group noise: one Gumbel per 32 tokens, and a draw inside the winning group.

By max-stability (FlashSampling, Lemma D.1) the largest y_i + T g_i of a group is distributed as
T (L + g), L the log-mass of the group, and the token that attains it is an independent draw from
the softmax of the group. So a group needs one Gumbel and one uniform instead of 32 Gumbels, and
the log-masses, from which log Z follows, are there anyway. `fsbench.reference` specifies it.

A group is what one thread of a tensor-core accumulator holds of an aligned block of 128 tokens:
{2q, 2q + 1} + 8j for j < 16. It depends on token ids alone and its sums run in the order of the
ids, so for equal logits the token does not depend on the tile.

`best_token` draws with token noise from tokens that are in registers as the members of groups. A
Philox block of token noise serves members 4i to 4i + 3 of a group.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.arithmetic import LOG2_E, log, nan_max
from fsbench.kernels.noise.contract import exponential, gumbel
from fsbench.kernels.noise.keys import ordered_key

SHARPEST = tl.constexpr(2.0**126)
"""1 / T of greedy rows: what is 2^-117 or more below the largest member has no mass."""
SMALL = tl.constexpr(2.0**-60)
LARGE = tl.constexpr(2.0**100)
"""Of greedy rows, members of groups whose largest is below SMALL are multiplied by LARGE: no two
numbers of fp32 are nearer than 2^-149, nor nearer than 2^-84 to one of SMALL or more."""
GROUP_STREAM = tl.constexpr(1 << 16)
"""Added to the sample's number in counter word 3: group noise shares no block with token noise."""


@triton.jit
def members(logits):
    """Return 32 tensors [R, WIDTH // 32]; the i-th holds member i of every group.

    logits: [R, WIDTH], of tokens from a multiple of 128 on. Where a thread holds whole groups
    nothing moves.
    """
    R: tl.constexpr = logits.shape[0]
    WIDTH: tl.constexpr = logits.shape[1]
    by_group = logits.reshape(R, WIDTH // 128, 16, 4, 2).permute(0, 1, 3, 2, 4)
    return split_last(by_group.reshape(R, WIDTH // 32, 32))


@triton.jit
def split_last(x):
    """[R, G, N] -> N tensors [R, G]; N is a power of two."""
    N: tl.constexpr = x.shape[2]
    if N == 2:
        first, second = x.split()
        return (first, second)
    else:
        low, high = x.reshape(x.shape[0], x.shape[1], 2, N // 2).permute(0, 1, 3, 2).split()
        return split_last(low) + split_last(high)


@triton.jit
def largest_member(y):
    """Members (tensors [R, G]) -> the largest of each group, NaN if one is."""
    m = y[0]
    for i in tl.static_range(1, len(y)):
        m = nan_max(m, y[i])
    return m


@triton.jit
def group_sums(y, inverse_temperature):
    """Members (tensors [R, G]) -> (m, sums): the largest, and the running sums of exp((y - m) / T).

    sums is a tuple like y; the last is the mass of the group in units of exp(m / T). A group
    without a finite member has m = -inf and mass 0.
    """
    m = largest_member(y)
    # Subtracted before scaling: c m would be rounded, and its error grows with m / T.
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
    """The group_sums by which members are drawn; inverse_temperature counts where T > 0 only.

    GREEDY_ROWS: temperature may be 0 in some rows: there only the largest members have a mass, of
    1, however little the others are below them.
    """
    if not GREEDY_ROWS:
        return group_sums(y, inverse_temperature)
    else:
        m = largest_member(y)
        finite = tl.where(m == float("-inf"), 0.0, m)
        greedy = temperature == 0.0
        c = tl.where(greedy, SHARPEST, inverse_temperature) * LOG2_E
        # Differences of numbers near 0 are so small that SHARPEST leaves them a mass. So those
        # are scaled by a power of two first, exactly; by 1 (which changes no bit) everywhere else.
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
    """The noise of every group, [R, G]: (1 / E with E exponential, u uniform in [0, 1)).

    Args:
        v0: the tile's first token, a multiple of 128. index: [1 or R, G] int32, 0 .. G - 1.
        row: [R, 1 or G] int32. seed, offset: scalars or [R, 1 or G]. sample: int32 scalar.
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
    """32 random bits (uint32) -> a number in [0, 1) of 24 bits."""
    return (bits >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def group_draws(y, m, sums, rate, u, temperature, GREEDY_ROWS: tl.constexpr):
    """A draw of every group: its score, the number of the member, and the member's logit.

    All are [R, G]. The score is m + T (log mass + Gumbel), and a Gumbel
    is -log E.

    Args:
        y, m, sums: members and what drawing_sums made of them.
        rate, u: of group_noise. temperature: scalar or [R, 1 or G].
        GREEDY_ROWS: temperature may be 0 in some rows: there the first of the largest logits wins.
    """
    score = m + temperature * log(tl.maximum(sums[len(sums) - 1], 1.0) * rate)
    # u has 24 bits, so u times the sum is below the sum, and some member is hit.
    threshold = u * sums[len(sums) - 1]
    if GREEDY_ROWS:
        threshold = tl.where(temperature == 0.0, 0.0, threshold)
    member, logit = _first_above(sums, threshold, y, (m < float("-inf")).to(tl.int32))
    return score, member, logit


@triton.jit
def _first_above(sums, threshold, y, first):
    """(first + i, y_i) of the first sum above the threshold, or of the last one if none is.

    The sums ascend, so halving the range finds it.
    """
    HALF: tl.constexpr = len(sums) // 2
    if HALF == 0:
        return first, y[0]
    else:
        above = threshold >= sums[HALF - 1]
        rest = ()
        rest_y = ()
        for i in tl.static_range(HALF):
            rest = rest + (tl.where(above, sums[HALF + i], sums[i]),)  # noqa: RUF005
            rest_y = rest_y + (tl.where(above, y[HALF + i], y[i]),)  # noqa: RUF005
        return _first_above(rest, threshold, rest_y, first + tl.where(above, HALF, 0))


@triton.jit
def token_of_member(v0, index, member):
    """The token that is a member (0 .. 31) of a group (index, from token v0 on)."""
    return v0 + index // 4 * 128 + index % 4 * 2 + (member >> 1) * 8 + (member & 1)


@triton.jit
def group_of_token(token):
    """The number of the group that a token is in."""
    return (token >> 7) * 4 + ((token >> 1) & 3)


@triton.jit
def group_candidates(y, m, sums, v0, row, seed, offset, temperature, sample,
                     GREEDY_ROWS: tl.constexpr):  # fmt: skip
    """The packed candidate of every group, [R, G] int64, and its logit; see group_draws."""
    index = tl.arange(0, m.shape[1])[None, :]
    # Always 0; ties the noise to the layout of the members, as in random_words.
    zero = (m < float("-inf")).to(tl.int32)
    rate, u = group_noise(v0, index + zero, row, seed, offset, sample)
    score, member, logit = group_draws(y, m, sums, rate, u, temperature, GREEDY_ROWS)
    score = tl.where(score == score, score, float("inf"))
    return ordered_key(score, token_of_member(v0, index, member)), logit


@triton.jit
def best_token(y, v0, index, row, seed, offset, temperature, sample):
    """Return the best of 32 tokens under token noise: (score, token, logit), [R, G] each.

    Args:
        y: 32 tensors [R, G], of `members`.
        others: as in group_noise; temperature as in group_draws.

    A score may be NaN. Of equal scores the lowest token's is taken.
    """
    # Always 0; ties the noise to the layout of the members.
    zero = (y[0] < float("-inf")).to(tl.int32)
    best = (zero.to(tl.float32) - float("inf"), zero, zero.to(tl.float32))
    for part in tl.static_range(8):
        # Aligned 128 tokens, a part of these, and pairs of columns in every eight of the part.
        block = ((v0 >> 7) + index // 4) * 32 + part * 4 + index % 4
        # Always 0, too: a block waits for the one before, which bounds live registers.
        zero |= (best[1] < 0).to(tl.int32)
        own = row * 0 + (block + zero) * 0
        words = tl.philox(seed, block + zero, row + own, offset.to(tl.int32) + own, own + sample)
        for i in tl.static_range(4):
            logit = y[part * 4 + i]
            score = logit + temperature * gumbel(words[i])
            best = better(best, (score, token_of_member(v0, index, part * 4 + i), logit))
    return best


@triton.jit
def better(best, other):
    """best = (score, token, logit), or the other if its score is larger. NaN stays.

    A thread meets its tokens in ascending order, so of equal scores the lowest token stays.
    """
    wins = other[0] > best[0]
    return (
        nan_max(best[0], other[0]),
        tl.where(wins, other[1], best[1]),
        tl.where(wins, other[2], best[2]),
    )
