"""The logits that are sampled, log Z, and log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST_TEMPERATURE = 2.0**-120
"""Temperatures below count as 0 (greedy)."""


def as_column(
    value: float | Tensor, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return a number, or one per row [B], as float64 [1 or B, 1].

    dtype: a number is rounded to this type first, since kernels take numbers in fp32. A tensor is
        not rounded.
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
    """Apply soft cap, bias and mask, in this order and in the type of `logits` [B, V].

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
    """Return a mask in either form as bool [B, V]."""
    if mask.dtype == torch.bool:
        return mask
    bits = mask[:, :, None] >> torch.arange(32, device=mask.device, dtype=mask.dtype)
    return (bits & 1).bool().flatten(1)[:, :V]


def log_partition(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return log Z = log sum exp(logits / T), float64 [B]; T = 1 in greedy rows (T = 0).

    Args:
        logits: [B, V]. temperature: a number, or [B].
    """
    return torch.logsumexp(logits.double() * inverse_temperature(temperature, logits.device), dim=1)


def log_probability(logits: Tensor, tokens: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return log softmax(logits / T) at tokens [B], float64; T = 1 in greedy rows."""
    picked = logits.gather(1, tokens[:, None]).double()
    scaled = (picked * inverse_temperature(temperature, logits.device))[:, 0]
    return scaled - log_partition(logits, temperature)


def largest(logits: Tensor, n: int, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Return the tokens of the n largest logits and their log-probabilities.

    Returns:
        tokens: int64 [B, n]; equal logits in the order of their ids. -1 after the last logit that
            is not -inf.
        logprob: float64 [B, n]; -inf where the token is -1.
    """
    y, tokens = logits.double().sort(dim=1, descending=True, stable=True)
    short = (0, max(0, n - y.shape[1]))
    y = torch.nn.functional.pad(y[:, :n], short, value=-torch.inf)
    tokens = torch.nn.functional.pad(tokens[:, :n], short).masked_fill(y == -torch.inf, -1)
    logz = log_partition(logits, temperature)[:, None]
    return tokens, y * inverse_temperature(temperature, logits.device) - logz


def inverse_temperature(temperature: float | Tensor, device: torch.device) -> Tensor:
    """Return 1 / T of a number or of [B], float64 [1 or B, 1]; 1 in greedy rows."""
    T = as_column(temperature, device)
    return 1.0 / torch.where(T < SMALLEST_TEMPERATURE, 1.0, T)


def matmul_error(hidden: Tensor, weight: Tensor) -> float:
    """Estimate the difference of logits in fp32 between two summation orders.

    A sum is within D 2^-24 sum |h w| of the exact value, and sum |h w| <= |h|_2 |w|_2. Rounding
    errors of either sign make sqrt(D) the realistic growth. Four times that is returned, which is
    far below the errors of a wrong kernel.

    Args:
        hidden: [B, D]. weight: [V, D].
    """
    D = hidden.shape[1]
    rows = [torch.nan_to_num(m.float(), 0.0, 0.0, 0.0).norm(dim=1).max() for m in (hidden, weight)]
    return 4.0 * D**0.5 * 2.0**-24 * float(rows[0] * rows[1])
