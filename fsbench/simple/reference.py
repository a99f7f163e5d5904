"""The decisions in plain torch and float64, without the core: the specification and the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.reference.logits import SMALLEST_TEMPERATURE
from fsbench.reference.truncation import penalized as dense_penalized
from fsbench.reference.truncation import token_counts, truncate


class Decided(NamedTuple):
    """What the samplers must return for each of B rows.

    tokens: int64 [B], -1 where the row is undefined.
    kept: bool [B, V]: the tokens that the filters keep; none in an undefined row.
    low, high: float64 [B, V]: the uniforms on which a token is drawn.
    """

    tokens: Tensor
    kept: Tensor
    low: Tensor
    high: Tensor

    def accepts(self, tokens: Tensor, uniform: Tensor, slack: float = 2e-6) -> Tensor:
        """bool [B]: the token is kept, and the uniform is its own up to fp32 rounding of masses."""
        V = self.kept.shape[1]
        at = tokens.clamp(0, V - 1)[:, None]
        kept, low, high = (part.gather(1, at)[:, 0] for part in (self.kept, self.low, self.high))
        near = kept & (uniform >= low - slack) & (uniform <= high + slack)
        return torch.where(self.tokens < 0, tokens == -1, near & (tokens >= 0) & (tokens < V))


def decide(
    logits: Tensor,
    uniform: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    order: Tensor | None = None,
) -> Decided:
    """Inverse CDF of the filtered softmax, tokens in the order of their places.

    Filters act after the temperature: min-p, then top-k, then top-p on what is left, normalized
    anew, with the token that crosses p. Of equal logits the lowest token goes first.

    Args:
        logits: [B, V]. uniform: float64 [B], in (0, 1).
        temperature, top_p, min_p, top_k: numbers, or [B]; 1, 0 and 0 turn the filters off. T = 0
            is greedy.
        order: int64 [V]: the token at each place; None: places are tokens.
    """
    V = logits.shape[1]
    kept = truncate(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p).kept
    undefined = ~kept.any(1)
    T = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1).expand(len(logits), 1)
    T = torch.where(undefined[:, None] | (T < SMALLEST_TEMPERATURE), 1.0, T)
    z = torch.where(undefined[:, None], 0.0, logits.double())
    p = torch.softmax((z / T).masked_fill(~kept & ~undefined[:, None], -torch.inf), 1)
    place = torch.arange(V) if order is None else order
    cdf = p[:, place].cumsum(1)
    high = torch.empty_like(cdf).scatter(1, place.expand_as(cdf), cdf)
    last = kept[:, place].double().cumsum(1).argmax(1)  # rounding may leave the sum below u
    at = torch.minimum((cdf <= uniform[:, None]).sum(1), last)
    return Decided(torch.where(undefined, -1, place[at]), kept, high - p, high)


def penalized(
    logits: Tensor,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sequence[int]],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Tensor:
    """fsbench.reference.penalized of the rows' histories: what the samplers keep in steps."""
    counts = (token_counts(part, logits.shape[1]) for part in (prompts, outputs))
    return dense_penalized(
        logits.float(), *counts, repetition=repetition, presence=presence, frequency=frequency
    )


def tail(logits: Tensor, hot: int, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """What the producer of logits [B, V], hot tokens first, supplies: fp32 [B] each.

    The largest logit beyond the hot ones, and the sum of exp((z - largest) / T) beyond them; at
    T = 0, where it is not used, that of T = 1.
    """
    beyond = logits[:, hot:].float()
    largest = beyond.amax(1)
    shifted = beyond - torch.where(largest == -torch.inf, 0.0, largest)[:, None]
    if isinstance(temperature, Tensor):
        T = temperature.to(logits.device).float().reshape(-1, 1)
        return largest, torch.exp(shifted / torch.where(T == 0, 1.0, T)).sum(1)
    # A number must not become a tensor on the GPU: the host would wait for all that is enqueued.
    return largest, torch.exp(shifted / (temperature or 1.0)).sum(1)
