"""The oracle: the specification of the noise contract, and the tokens a sampler may return.

docs/design/noise.md explains the contract. The code is integer arithmetic or float64 in torch, runs
on any device, and is written to be read:

    philox      the counter-based generator
    noise       Gumbel and uniform variates of tokens and of groups of tokens
    logits      soft cap, bias, mask; log Z and log-probabilities
    truncation  penalties; tokens kept by top-k, top-p and min-p
    expected    the token of each row, and tokens that fp32 rounding may return instead
    acceptance  probability that two distributions with the same noise give the same token
"""

from fsbench.reference.acceptance import coupled_acceptance
from fsbench.reference.expected import Expected, expect
from fsbench.reference.logits import (
    as_column,
    inverse_temperature,
    largest,
    log_partition,
    log_probability,
    matmul_error,
    processed_logits,
    unpacked,
)
from fsbench.reference.noise import (
    GROUP_STREAM,
    GUMBEL_ERROR,
    exponential,
    group_and_member,
    group_noise,
    gumbel,
    token_noise,
    token_of_member,
    word_and_lane,
)
from fsbench.reference.philox import philox4x32
from fsbench.reference.truncation import (
    MASS_ERROR,
    REACHED,
    Truncation,
    filtered_probabilities,
    penalized,
    token_counts,
    truncate,
)

__all__ = [
    "GROUP_STREAM",
    "GUMBEL_ERROR",
    "MASS_ERROR",
    "REACHED",
    "Expected",
    "Truncation",
    "as_column",
    "coupled_acceptance",
    "expect",
    "exponential",
    "filtered_probabilities",
    "group_and_member",
    "group_noise",
    "gumbel",
    "inverse_temperature",
    "largest",
    "log_partition",
    "log_probability",
    "matmul_error",
    "penalized",
    "philox4x32",
    "processed_logits",
    "token_counts",
    "token_noise",
    "token_of_member",
    "truncate",
    "unpacked",
    "word_and_lane",
]
