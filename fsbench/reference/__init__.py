"""The oracle: the noise contract in its plainest form, and the tokens a sampler may return.

This package is the specification (docs/design/noise.md explains it). Everything is integer
arithmetic or float64 in torch, so it runs on any device and can be read line by line:

    philox      the counter-based generator
    noise       random words -> Gumbel and uniform variates, of tokens and of groups of tokens
    logits      what is sampled: soft cap, bias, mask; log Z
    truncation  penalties; what top-k, top-p and min-p keep
    expected    the token of each row, and which others fp32 rounding may put in its place
    acceptance  how often two laws with the same noise give the same token
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
