"""Thresholds that k numbers of a row reach, and slots for those that reach one: device code."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _add_three(a1, a2, a3, b1, b2, b3):
    return a1 + b1, a2 + b2, a3 + b3


@triton.jit
def three_sums(a, b, c):
    """Return the sums of three tensors [N] with one synchronization of the warps."""
    if INTERPRETED:  # the interpreter would add up triples in Python, one by one
        return tl.sum(a), tl.sum(b), tl.sum(c)
    else:
        return tl.reduce((a, b, c), 0, _add_three)


@triton.jit
def reached_by(order, k, low, above_all):
    """Return an int32 threshold >= `low` that k of `order` [N] reach, and at most k / 8 more.

    It is `low` itself if no more than that reach it. If `order` has the largest logits of parts of
    a row, the threshold is a lower bound of the row's kth largest logit.
    """
    reaches = order >= low
    reach = tl.sum(reaches.to(tl.int32))
    low = low.to(tl.int64)
    if reach > k + k // 8:
        low = tl.min(tl.where(reaches, order, 0x7FFFFFFF)).to(tl.int64)
    high = above_all.to(tl.int64)
    while (reach > k + k // 8) & (high - low > 1):
        step = tl.maximum((high - low) >> 2, 1)
        c1, c2, c3 = three_sums(
            (order >= (low + step).to(tl.int32)).to(tl.int32),
            (order >= tl.minimum(low + 2 * step, high).to(tl.int32)).to(tl.int32),
            (order >= tl.minimum(low + 3 * step, high).to(tl.int32)).to(tl.int32),
        )
        n = (c1 >= k).to(tl.int64) + (c2 >= k).to(tl.int64) + (c3 >= k).to(tl.int64)
        reach = tl.where(n == 3, c3, tl.where(n == 2, c2, tl.where(n == 1, c1, reach)))
        high = tl.where(n < 3, tl.minimum(low + (n + 1) * step, high), high)
        low += n * step
    return low.to(tl.int32)


@triton.jit
def places(counter_ptr, order, low):
    """Give each number that is at least `low` a slot from a counter in memory, in no order.

    For few numbers this is faster than a prefix sum, whose code takes long to fetch.
    """
    # Always 0, which the compiler does not know: else it would combine a warp's atomics and wait.
    zero = (order == 0x7FFFFFFF).to(tl.int32)
    return tl.atomic_add(counter_ptr + zero, 1, mask=order >= low, sem="relaxed", scope="cta")
