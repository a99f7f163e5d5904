"""The logits that are sampled, and their normalizer."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_TEMPERATURE = 2.0**-120
"""Anything below is greedy: fp32 does not tell it from 0."""


def as_column(
    value: float | Tensor, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a number, or one of each row [B], as float64 [1 or B, 1].

    dtype: what a number is rounded to first, whatever torch's default dtype is. Kernels take
        numbers in fp32. A tensor is used as it is.
    """
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=dtype, device=device)
    return value.to(device).double().reshape(-1, 1)


def processed_logits(
    logits: Tensor,
    *,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Soft cap, then bias, then mask, in the type of `logits` [B, V].

    Args:
        soft_cap: logits become soft_cap tanh(logits / soft_cap) (Gemma).
        bias: [V] or [B, V], added.
        mask: bool [B, V], or int32 [B, >= ceil(V / 32)] with token v in bit v % 32 of word v // 32;
            true or 1 allows a token, others get -inf.
    """
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if mask is not None:
        logits = logits.masked_fill(~unpacked(mask, logits.shape[1]), -torch.inf)
    return logits


def unpacked(mask: Tensor, V: int) -> Tensor:
    """bool [B, V] of a mask in either form."""
    if mask.dtype == torch.bool:
        return mask
    bits = mask[:, :, None] >> torch.arange(32, device=mask.device, dtype=mask.dtype)
    return (bits & 1).bool().flatten(1)[:, :V]


def log_partition(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log Z = log sum exp(logits / T), [B] float64; greedy rows (T = 0) count at T = 1.

    Args:
        logits: [B, V]. temperature: a number, or [B].
    """
    return torch.logsumexp(logits.double() * inverse_temperature(temperature, logits.device), dim=1)


def log_probability(logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """log softmax(logits / T) at tokens [B], float64; greedy rows count at T = 1."""
    picked = logits.gather(1, tokens[:, None]).double()
    scaled = (picked * inverse_temperature(temperature, logits.device))[:, 0]
    return scaled - log_partition(logits, temperature)


def largest(logits: Tensor, n: int, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B, n] of the largest logits, their log-probabilities float64 [B, n]).

    Of equal logits the lower token comes first. Where a row has fewer that are not -inf: -1, -inf.
    """
    y, tokens = logits.double().sort(dim=1, descending=True, stable=True)
    short = (0, max(0, n - y.shape[1]))
    y = torch.nn.functional.pad(y[:, :n], short, value=-torch.inf)
    tokens = torch.nn.functional.pad(tokens[:, :n], short).masked_fill(y == -torch.inf, -1)
    logz = log_partition(logits, temperature)[:, None]
    return tokens, y * inverse_temperature(temperature, logits.device) - logz


def inverse_temperature(temperature: float | Tensor, device: torch.device) -> Tensor:
    """1 / T of a number or of [B], float64 [1 or B, 1]; 1 in greedy rows."""
    T = as_column(temperature, device)
    return 1.0 / torch.where(T < SMALLEST_TEMPERATURE, 1.0, T)


def matmul_error(hidden: Tensor, weight: Tensor) -> float:
    """How far fp32-accumulated logits of hidden [B, D], weight [V, D] may be apart: an estimate.

    Each of two summation orders is within D 2^-24 sum |h w| of the exact value; that sum is at
    most |h|_2 |w|_2, and rounding errors of either sign make sqrt(D) the realistic growth. Four
    times that is used: far below any spacing that a wrong kernel would produce.
    """
    D = hidden.shape[1]
    rows = [torch.nan_to_num(m.float(), 0.0, 0.0, 0.0).norm(dim=1).max() for m in (hidden, weight)]
    return 4.0 * D**0.5 * 2.0**-24 * float(rows[0] * rows[1])
