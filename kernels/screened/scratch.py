"""Memory of a screened call, and what its rounding of hidden needs to know of D."""

from __future__ import annotations

import triton

from fsbench.kernels.screened.bounds import accumulation_error

COUNTERS = 16
"""Three are used; so many keep what follows aligned."""


def rounding_numbers(D: int) -> dict[str, float]:
    """What the rounding of a row of hidden needs to know of D, by the kernels' names for it."""
    return {
        "gamma": accumulation_error(D),
        "norm_inflation": 1 + (D + 4) * 2.0**-24,
        "root": D**0.5,
    }


def rounded_columns(D: int, num_warps: int) -> int:
    """Columns of hidden that are rounded at a time: 16 in each thread."""
    return min(512 * num_warps, triton.next_power_of_2(D))
