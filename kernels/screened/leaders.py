"""Device code: shorten the list of each row by a close lower bound of its best score.

A token stays on a row's list if its score may be above the largest lower bound. Both are off by
about the bound of the screen, so tokens up to two bounds below the best score are on the list. The
logit of one token of each row, which the whole program adds up in whatever order is fast, is off by
rounding alone. It leaves the tokens up to one bound below the best score. Their number grows
exponentially with this distance, so few are left (docs/design/screened-head-proof.md).

Filters from the screen bound the logits of their leaders in the same way (`close_logits`).
"""

import triton
import triton.language as tl

from fsbench.kernels.screened.exact_logits import ask_for_rows, noise_of_tokens, with_options
from fsbench.kernels.screened.lower_bounds import bound_of_word, raise_bounds, steps_of_rows
from fsbench.kernels.screened.rounding import LEADING, LED
from fsbench.kernels.screened.score_bounds import (
    ABSOLUTE_SLACK,
    BIAS_SLACK,
    CAP_SLACK,
    ROUGH_SLACK,
    ROUNDING,
)

SCANNED = tl.constexpr(1024)
"""Entries of a list that are read at once."""
ADDED_AT_ONCE = tl.constexpr(1024)
"""Columns that are multiplied and added at once."""
WORD = tl.constexpr(4)
"""Tokens of a word. Those that are listed are neighbors and have the word's upper bound."""


@triton.jit
def shorten_lists(request, lists, sizes, gamma, listed_ptr, counters_ptr, NOISE: tl.constexpr,
                  SEED_PER_ROW: tl.constexpr, OFFSET_PER_ROW: tl.constexpr,
                  TEMPERATURE_PER_ROW: tl.constexpr, RANKS: tl.constexpr, LIST: tl.constexpr,
                  IN_BULK: tl.constexpr):  # fmt: skip
    """Shorten the lists of the rows that this program claims, and wait for all others.

    Programs claim rows, so none waits for a program that does not run yet.

    Args:
        request: as in exact_logits.exact_scores. lists: (lower_ptr, line, list_ptr), as the
            arguments of resolve_kernel. sizes: (B, V, D). gamma: bounds.accumulation_error(D).
        others: as in resolve_kernel.
    """
    B = sizes[0]
    to_tokens = B.to(tl.int64) * LIST  # from a token's upper bound
    b = tl.atomic_add(counters_ptr + LEADING, 1, sem="relaxed")
    while b < B:
        entries = tl.load(listed_ptr + b)
        if (entries > 0) & (entries <= LIST):
            uppers = lists[2] + b.to(tl.int64) * LIST
            bound = _bound_of_leader(
                request, lists, sizes, gamma, uppers, to_tokens, b, entries, NOISE, SEED_PER_ROW,
                OFFSET_PER_ROW, TEMPERATURE_PER_ROW, RANKS, IN_BULK,
            )  # fmt: skip
            tl.store(listed_ptr + b, _keep(uppers, to_tokens, entries, bound))
        tl.debug_barrier()
        tl.atomic_add(counters_ptr + LED, 1, sem="release")
        b = tl.atomic_add(counters_ptr + LEADING, 1, sem="relaxed")
    led = tl.atomic_add(counters_ptr + LED, 0, sem="acquire")
    while led < B:
        led = tl.atomic_add(counters_ptr + LED, 0, sem="acquire")


@triton.jit
def _bound_of_leader(request, lists, sizes, gamma, uppers, to_tokens, b, entries,
                     NOISE: tl.constexpr, SEED_PER_ROW: tl.constexpr, OFFSET_PER_ROW: tl.constexpr,
                     TEMPERATURE_PER_ROW: tl.constexpr, RANKS: tl.constexpr,
                     IN_BULK: tl.constexpr):  # fmt: skip
    """Raise the lower bound of row b's best score to that of its leader, and return it.

    uppers, to_tokens: the row's list, as in _keep.
    """
    hidden_ptr, weight_ptr, _, _, _, soft_cap, bias_ptr, row_bias_ptr = request
    lower_ptr, line, _ = lists
    B, V, D = sizes
    place, largest = _first_of_largest(uppers, entries)
    i = place + tl.arange(0, WORD)
    upper = tl.load(uppers + i, mask=i < entries, other=0).to(tl.float32, bitcast=True)
    token = tl.load(uppers + to_tokens + i, mask=i < entries, other=0)
    exists = (i < entries) & (upper == largest) & (token >= 0) & (token < V)
    token = tl.where(exists, token, 0)
    if IN_BULK:
        ask_for_rows(weight_ptr + token.to(tl.int64) * D, exists, D)
    # The noise is computed while the rows are loaded.
    g, T = noise_of_tokens(
        request, b, token, NOISE, SEED_PER_ROW, OFFSET_PER_ROW, TEMPERATURE_PER_ROW
    )
    y, slack = close_logits(
        hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, exists, V, D, gamma
    )
    slack += T * ROUGH_SLACK
    lower = y + g - slack
    # Comparisons leave out NaN, and an infinity decides nothing here.
    lower = tl.where(exists & (tl.abs(lower) < float("inf")), lower, float("-inf"))
    best = tl.max(lower, 0)
    steps = steps_of_rows(b, b < B, line)
    raise_bounds(lower_ptr, b, best, b < B, steps, line, RANKS)
    return tl.maximum(bound_of_word(tl.load(lower_ptr + b, volatile=True), steps), best)


@triton.jit
def _first_of_largest(uppers, entries):
    """Return (place, bound) of the first of the largest finite upper bounds on a list.

    Without a finite bound: (0, -inf).
    """
    place = 0
    largest = float("-inf")
    for first in range(0, entries, SCANNED):
        i = first + tl.arange(0, SCANNED)
        upper = tl.load(uppers + i, mask=i < entries, other=0).to(tl.float32, bitcast=True)
        upper = tl.where((i < entries) & (upper < float("inf")), upper, float("-inf"))
        top = tl.max(upper, 0)
        first_of_top = tl.min(tl.where(upper == top, i, 2**30), 0)
        place = tl.where(top > largest, first_of_top, place)
        largest = tl.maximum(largest, top)
    return place, largest


@triton.jit
def close_logits(hidden_ptr, weight_ptr, soft_cap, bias_ptr, row_bias_ptr, b, token, exists, V, D,
                 gamma):  # fmt: skip
    """Return (y, slack): the logits of tokens [R] of row b before the mask are within slack of y.

    The logits are those of the fused kernels. Sums here have another order, without dependent
    instructions. exists: which of the tokens exist; the others are 0.
    """
    y, size = _sum_of_products(hidden_ptr, weight_ptr, b, token, exists, D)
    # The fused kernels' sum may have any order (gamma). Here a product is rounded at most this
    # often, in whatever order tl.sum adds up ADDED_AT_ONCE numbers.
    roundings = tl.cdiv(D, ADDED_AT_ONCE) + ADDED_AT_ONCE
    slack = size * (gamma + roundings * 2.0**-24 + ROUNDING) + 2 * ABSOLUTE_SLACK
    if soft_cap is not None:
        slack += soft_cap * CAP_SLACK
    y, bias = with_options(y, soft_cap, bias_ptr, row_bias_ptr, b, token, V)
    if bias_ptr is not None or row_bias_ptr is not None:
        slack += tl.abs(bias) * BIAS_SLACK
    return y, slack


@triton.jit
def _sum_of_products(hidden_ptr, weight_ptr, b, token, exists, D):
    """Return (hidden[b] . weight[token], the sum of the products' magnitudes), fp32 [R] each."""
    R: tl.constexpr = token.shape[0]
    row = weight_ptr + token.to(tl.int64)[:, None] * D
    column = tl.arange(0, ADDED_AT_ONCE)[None, :]
    h_row = hidden_ptr + b.to(tl.int64) * D + column
    y = tl.zeros((R, ADDED_AT_ONCE), tl.float32)
    size = tl.zeros((R, ADDED_AT_ONCE), tl.float32)
    for d in tl.range(0, D, ADDED_AT_ONCE, loop_unroll_factor=4):
        inside = d + column < D
        w = tl.load(row + d + column, mask=exists[:, None] & inside, other=0.0).to(tl.float32)
        h = tl.load(h_row + d, mask=inside, other=0.0).to(tl.float32)
        product = w * h
        y += product
        size += tl.abs(product)
    return tl.sum(y, 1), tl.sum(size, 1)


@triton.jit
def _keep(uppers, to_tokens, entries, bound):
    """Keep the entries of a list that reach `bound`, in order, and return their number.

    to_tokens: the distance of a token from its upper bound.
    """
    kept = 0
    for first in range(0, entries, SCANNED):
        i = first + tl.arange(0, SCANNED)
        upper = tl.load(uppers + i, mask=i < entries, other=0)
        token = tl.load(uppers + to_tokens + i, mask=i < entries, other=0)
        reaches = ((i < entries) & ((upper.to(tl.float32, bitcast=True) < bound) == 0)).to(tl.int32)
        to = kept + tl.cumsum(reaches, 0) - reaches
        tl.debug_barrier()  # all of these have been read before any is overwritten
        tl.store(uppers + to, upper, mask=reaches != 0)
        tl.store(uppers + to_tokens + to, token, mask=reaches != 0)
        kept += tl.sum(reaches, 0)
    return kept
