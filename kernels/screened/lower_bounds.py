"""Device code of the screen: the largest lower bound of each row so far, for all programs.

Any lower bound of a row's best score may prune the row's tokens, also one of another rank's token.
So programs raise a row's bound on all ranks, after each tile. No program waits for a bound: one
that arrives late leaves more candidates and changes no token. With all bounds, the ranks together
have about as many candidates as one GPU.

The upper half of a word is the bound. With other ranks, the lower half is the number of the step:
the row's count of exchanged candidates (shard.exchange), which is the same on all ranks. So a word
of another step, whether earlier or later, is never taken for a bound of this one. The second launch
resets the words. This may erase a bound that another rank has sent for the next step, which leaves
more candidates.
"""

import triton
import triton.language as tl

from fsbench.kernels.noise.keys import flipped, ordered
from fsbench.kernels.screened.score_bounds import LOWEST_BOUND
from fsbench.kernels.shard.exchange import bounds_of_rank


@triton.jit
def local_bounds(lower_ptr, line):
    """Return the address of the rows' words on this rank.

    Args:
        lower_ptr: int64 [B] of the workspace, used without other ranks.
        line: as in shard.exchange.send, or () without other ranks.
    """
    words_ptr = lower_ptr
    if len(line) > 0:
        words_ptr = bounds_of_rank(line[2], line)
    return words_ptr


@triton.jit
def steps_of_rows(rows, in_bounds, line):
    """Return the numbers of the rows' steps, (int32,), negative; () without other ranks."""
    steps = ()
    if len(line) > 0:
        # A new buffer has 0, which is no step.
        steps = (tl.load(line[1] + rows, mask=in_bounds, other=0) | -(2**31),)  # type: ignore[assignment]
    return steps


@triton.jit
def bound_of_word(word, steps):
    """Return the bound of a word, fp32; LOWEST_BOUND for LOWEST_KEY and words of other steps."""
    order = (word >> 32).to(tl.int32)
    none = order == -(2**31)
    if len(steps) > 0:
        none |= word.to(tl.int32) != steps[0]
    # The bits of LOWEST_KEY are not a number.
    x = tl.where(none, 0, flipped(order)).to(tl.float32, bitcast=True)
    return tl.where(none, LOWEST_BOUND, x)


@triton.jit
def raise_bounds(lower_ptr, rows, best, mask, steps, line, RANKS: tl.constexpr):
    """Raise the bounds of rows to `best`, fp32 (no NaN), on all ranks, where `mask`.

    lower_ptr: of local_bounds. steps: of steps_of_rows.
    """
    mask &= best > LOWEST_BOUND
    word = ordered(best).to(tl.int64) << 32
    if len(line) > 0:
        word |= steps[0].to(tl.int64) & 0xFFFFFFFF
        for k in tl.static_range(RANKS):
            to = bounds_of_rank(k, line) + rows
            tl.atomic_max(to, word, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.atomic_max(lower_ptr + rows, word, mask=mask, sem="relaxed")
