"""The decisions of the samplers in torch and float64: the specification, which needs no core."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.reference.logits import SMALLEST_TEMPERATURE
from fsbench.reference.truncation import truncate


class Decided(NamedTuple):
    """The expected decision of each of B rows.

    Attributes:
        tokens: int64 [B]; -1 in an undefined row.
        kept: bool [B, V], the tokens that the filters keep; none in an undefined row.
        low, high: float64 [B, V], the interval of uniforms that draws a token.
    """

    tokens: Tensor
    kept: Tensor
    low: Tensor
    high: Tensor

    def accepts(self, tokens: Tensor, uniform: Tensor, slack: float = 2e-6) -> Tensor:
        """Return bool [B]: a kept token whose interval has the uniform, up to fp32 rounding."""
        V = self.kept.shape[1]
        columns = tokens.clamp(0, V - 1)[:, None]
        kept, low, high = (x.gather(1, columns)[:, 0] for x in (self.kept, self.low, self.high))
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
) -> Decided:
    """Draw from the filtered softmax by its inverse CDF, in the order of the tokens.

    Filters act after the temperature: min-p, then top-k, then top-p on the remaining tokens,
    normalized again, with the token that crosses p. Of equal logits the lowest token is first.

    Args:
        logits: [B, V].
        uniform: float64 [B], in (0, 1).
        temperature, top_k, top_p, min_p: Numbers, or [B]. T = 0 is greedy; 0, 1 and 0 turn the
            filters off.
    """
    kept = truncate(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p).kept
    undefined = ~kept.any(1)
    T = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1).expand(len(logits), 1)
    T = torch.where(undefined[:, None] | (T < SMALLEST_TEMPERATURE), 1.0, T)
    z = torch.where(undefined[:, None], 0.0, logits.double())
    p = torch.softmax((z / T).masked_fill(~kept & ~undefined[:, None], -torch.inf), 1)
    cdf = p.cumsum(1)
    last = kept.double().cumsum(1).argmax(1)  # rounding may leave the sum below u
    tokens = torch.minimum((cdf <= uniform[:, None]).sum(1), last)
    return Decided(torch.where(undefined, -1, tokens), kept, cdf - p, cdf)


def tail(logits: Tensor, hot: int, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return what a producer supplies: statistics of the logits [B, V] beyond the hot ones.

    Returns:
        The largest of them, fp32 [B], and the sum of exp((z - largest) / T) over them, fp32 [B]; at
        T = 0, where the sum is not used, that of T = 1.
    """
    beyond = logits[:, hot:].float()
    largest = beyond.amax(1)
    shifted = beyond - torch.where(largest == -torch.inf, 0.0, largest)[:, None]
    if isinstance(temperature, Tensor):
        T = temperature.to(logits.device).float().reshape(-1, 1)
        return largest, torch.exp(shifted / torch.where(T == 0, 1.0, T)).sum(1)
    # A number must not become a tensor on the GPU: the host would wait for the GPU.
    return largest, torch.exp(shifted / (temperature or 1.0)).sum(1)
