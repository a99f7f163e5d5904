"""What the public calls return."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.kernels.call.request import Request


class Sample(NamedTuple):
    """What flash_sample returns; the shapes are those of one sample per row, or of n.

    tokens: int64 [B] or [B, n]; -1 in a row that has no draw.
    valid: bool [B]; False for a row that has no draw.
    logprob: fp32 [B] or [B, n], or None if not asked for: log softmax(logits / T) at the token.
    logz: fp32 [B], or None: log sum exp(logits / T).

    Where T = 0 the token is the argmax, and logprob and logz are those of T = 1. In a row without
    a draw both are NaN.
    """

    tokens: Tensor
    valid: Tensor
    logprob: Tensor | None = None
    logz: Tensor | None = None


def empty_sample(request: Request, logprob: bool, logz: bool) -> Sample:
    """A Sample for a launch to write to."""
    B, n, device = request.hidden.shape[0], request.num_samples, request.hidden.device
    shape = (B,) if n == 1 else (B, n)
    return Sample(
        torch.empty(shape, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        torch.empty(shape, dtype=torch.float32, device=device) if logprob else None,
        torch.empty(B, dtype=torch.float32, device=device) if logz else None,
    )


class Score(NamedTuple):
    """What score returns; the shapes are those of one target per row, or of n.

    logprob: fp32 [B] or [B, n]: log softmax(logits / T) at the target; 0 where that is -100, NaN
        where there is none.
    logz: fp32 [B]: log sum exp(logits / T); NaN in a row that is undefined.
    valid: bool, of the shape of logprob; False where logprob is NaN: the target is out of range, or
        the row has a NaN or +inf logit, no finite one, or a temperature that is none.
    """

    logprob: Tensor
    logz: Tensor
    valid: Tensor


class Screened(NamedTuple):
    """What screened_sample returns: the fields of Sample, and one more.

    found: int32 [B], tokens of a row whose exact logits were computed; -1 if all were, because the
        bounds left more tokens than there was room for. None if the full kernel ran, because
        several samples or log-probabilities were asked for.
    """

    tokens: Tensor
    valid: Tensor
    logprob: Tensor | None = None
    logz: Tensor | None = None
    found: Tensor | None = None


class TruncatedSample(NamedTuple):
    """What truncated_sample returns.

    tokens: int64 [B]; -1 in a row that has no draw.
    valid: bool [B]; False for a row that has no draw.
    kept: int32 [B]: how many tokens the filters kept, 0 in a row without a draw; or None.
    """

    tokens: Tensor
    valid: Tensor
    kept: Tensor | None
