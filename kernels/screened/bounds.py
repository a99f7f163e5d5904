"""The screen in plain torch: logits from the int8 copy, the bound of their error, candidates.

It is the specification of the device code and what runs on a CPU; docs/guide/screened-head.md has
the proof. For row b and token v

    z_bv = scale_v step_b (256 code_v . high_b + code_v . low_b)
    |logit_bv - z_bv| <= residual_v reach_b + norm_v spread_b

where logit is what a bf16 matmul with fp32 accumulation returns, in any order of summation. With
token noise a token can have the best score of its row only if the largest score that it may have
reaches the largest of all smallest ones: these tokens are the candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.kernels.screened.int8_copy import LARGEST_ENTRY, SMALLEST_MAXIMUM, HeadCopy

LARGEST_STEPS = 32_512
"""256 * 127: hidden is rounded to 16 bits, of which the high byte must not exceed 127."""
LARGEST_TEMPERATURE = 2.0**100
"""Rows with a higher one are computed in full: their scores might overflow."""
INFLATION = 1 + 2.0**-18
"""Factor of reach, spread and slack, for the roundings by which they and the bound are computed."""
ROUNDING = 2.0**-18
"""Error of the screen's arithmetic and the scores', relative to |norm_v| (|h| + rounding)."""
NOISE_SLACK = 2.0**-15
"""Per unit of temperature: two computations of T g, and scores of up to 23 T rounded."""
ROUGH_NOISE_SLACK = 2.0**-9
"""The same on the device, where noise is rough (screened.score_bounds.rough_gumbel, 2^-10)."""
BIAS_SLACK = 2.0**-21
CAP_SLACK = 2.0**-20
ABSOLUTE_SLACK = 2.0**-80
"""Covers terms that underflow; each is below 2^-86."""
_AT_ONCE = 1 << 24  # codes that are float64 at a time: 128 MiB


def accumulation_error(D: int) -> float:
    """Return a bound of |logit - exact| / sum |h w|, for any order of summation in fp32.

    It allows two roundings for each of D additions (docs/guide/screened-head.md).
    """
    return (D + 8) * 2.0**-23


class ScreenedHidden(NamedTuple):
    """Hidden states in 16 bits, as two bytes, and the terms of the bound that depend on the row.

    high, low: int8 [B, D]: h = step (256 high + low) + error.
    step, reach, spread: fp32 [B]. reach is +inf in a row that is not screened, because it is not
        finite or has entries above 2^50.
    """

    high: Tensor
    low: Tensor
    step: Tensor
    reach: Tensor
    spread: Tensor


def screen_hidden(hidden: Tensor) -> ScreenedHidden:
    """Round hidden [B, D] to 16 bits; every step is fp32, as on the device."""
    h = hidden.float()
    D = h.shape[1]
    largest = h.abs().amax(1, keepdim=True)
    screened = largest <= LARGEST_ENTRY
    rounded = screened & (largest >= SMALLEST_MAXIMUM)
    unit = torch.where(rounded, largest, 1.0)
    x = torch.where(screened, h, 0.0) / unit  # at most 1, so squares cannot overflow
    # Below SMALLEST_MAXIMUM x is tiny, and its norm is replaced by a bound.
    codes = torch.where(rounded, (x * LARGEST_STEPS).round(), 0.0)
    error = (x - codes / LARGEST_STEPS).abs()
    high = torch.floor((codes + 128) / 256)
    # x, the quotient, step and (where it is not exact) a division are rounded: 2^-20 |x| in all.
    size = _norm(x, D)
    spread = _norm(error, D) + 2.0**-20 * size
    small = D**0.5 * SMALLEST_MAXIMUM
    size = torch.where(rounded, unit * size, small)
    spread = torch.where(rounded, unit * spread, small)
    gamma = accumulation_error(D)
    reach = size * (1 + gamma) * INFLATION
    spread = (spread + (gamma + ROUNDING) * (size + spread)) * INFLATION
    return ScreenedHidden(
        high.to(torch.int8),
        (codes - 256 * high).to(torch.int8),
        torch.where(rounded, largest * (1 / LARGEST_STEPS), 0.0)[:, 0],
        torch.where(screened, reach, torch.inf)[:, 0],
        torch.where(screened, spread, 0.0)[:, 0],
    )


def _norm(x: Tensor, D: int) -> Tensor:
    """Return an fp32 norm of each row, increased by what roundings and underflow may have lost."""
    return (x * x).sum(1, keepdim=True).sqrt() * (1 + (D + 4) * 2.0**-24) + 2.0**-54


def screen_logits(head: HeadCopy, hidden: ScreenedHidden) -> tuple[Tensor, Tensor]:
    """Return (z, bound), fp32 [B, V]: each logit is within bound of z; +inf is no bound."""
    B, D = hidden.high.shape
    both = torch.cat([hidden.high, hidden.low]).double()
    rows = max(1, _AT_ONCE // D)
    # float64 holds sums of D products of two bytes exactly, and CPUs multiply it fast. Like an
    # int32 on the device, a sum is rounded to fp32 once.
    sums = torch.cat([(both @ part.double().T).float() for part in head.codes.split(rows)], dim=1)
    z = (sums[:B] * 256.0 + sums[B:]) * hidden.step[:, None] * head.scale[None, :]
    bound = head.residual[None, :] * hidden.reach[:, None] + head.norm * hidden.spread[:, None]
    return z, bound + ABSOLUTE_SLACK


def score_bounds(
    z: Tensor,
    bound: Tensor,
    gumbels: Tensor,
    temperature: Tensor,
    *,
    soft_cap: float | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (lower, upper), fp32 [B, V]: bounds of the fp32 score y + T g of every token.

    Args:
        z, bound: of screen_logits. gumbels: [B, V].
        temperature: fp32 [B, 1]; 0 is greedy.
        soft_cap, bias: of the logits y, as in flash_sample; bias [V] or [B, V].
        allowed: bool [B, V]; where False both are -inf.
    """
    slack = temperature * (NOISE_SLACK * INFLATION) + ABSOLUTE_SLACK
    bound = bound + torch.where(temperature <= LARGEST_TEMPERATURE, slack, torch.inf)
    if soft_cap is not None:
        z = soft_cap * torch.tanh(z / soft_cap)
        bound = bound + soft_cap * CAP_SLACK
    if bias is not None:
        z = z + bias.float()
        # A bias that is not finite decides alone: -inf forbids, unless the logit is undefined.
        bound = bound + torch.where(torch.isfinite(bias), bias.float().abs() * BIAS_SLACK, 0.0)
    score = z + temperature * gumbels.float()
    bounded = bound < torch.inf
    upper = torch.where(bounded, score + bound, torch.inf)
    lower = torch.where(bounded & (upper < torch.inf), score - bound, -torch.inf)
    upper = torch.where(torch.isnan(upper), torch.inf, upper)
    if allowed is not None:
        lower = torch.where(allowed, lower, -torch.inf)
        upper = torch.where(allowed, upper, -torch.inf)
    return lower, upper


def candidates(lower: Tensor, upper: Tensor) -> Tensor:
    """Return which tokens may have the best score of their row, bool [B, V]."""
    return (upper >= lower.amax(1, keepdim=True)) & (upper > -torch.inf)
