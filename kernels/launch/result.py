"""The results of the public calls, and the allocation of some."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.kernels.launch.request import Request


class Sample(NamedTuple):
    """The result of `flash_sample`, for one sample per row or n.

    Where T = 0 the token is the argmax, and log-probabilities, logz and entropy are those of T = 1.
    In a row without a draw these are NaN, and ranks and tokens are -1. Fields that were not
    requested are None.

    Attributes:
        tokens: int64 [B] or [B, n]; -1 in a row without a draw.
        valid: bool [B]; False for a row without a draw.
        logprob: fp32 [B] or [B, n], log softmax(logits / T) at the token.
        logz: fp32 [B], log sum exp(logits / T).
        entropy: fp32 [B], -sum p log p of p = softmax(logits / T).
        rank: int32 [B] or [B, n], the number of tokens with a larger logit than the drawn one.
        top_tokens: int64 [B, k], the tokens of the k largest logits in descending order, lower
            tokens first among equal logits; -1 from the number of allowed tokens on.
        top_logprob: fp32 [B, k], the log-probabilities of top_tokens; -inf where those are -1.
    """

    tokens: Tensor
    valid: Tensor
    logprob: Tensor | None = None
    logz: Tensor | None = None
    entropy: Tensor | None = None
    rank: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprob: Tensor | None = None


class Extras(NamedTuple):
    """The optional fields of Sample that a call requests; top: the number of top_tokens."""

    logprob: bool = False
    logz: bool = False
    entropy: bool = False
    rank: bool = False
    top: int = 0


_OPTIONAL = {
    "logprob": ("logprob", torch.float32, "samples"),
    "logz": ("logz", torch.float32, "rows"),
    "entropy": ("entropy", torch.float32, "rows"),
    "rank": ("rank", torch.int32, "samples"),
    "top_tokens": ("top", torch.int64, "top"),
    "top_logprob": ("top", torch.float32, "top"),
}
"""Optional field of Sample -> the field of Extras that requests it, its dtype, and its shape."""


def sample_fields(
    request: Request, extras: Extras
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of each field of Sample that the request has."""
    B, n = request.hidden.shape[0], request.num_samples
    shapes = {"samples": (B,) if n == 1 else (B, n), "rows": (B,), "top": (B, extras.top)}
    fields: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tokens": (torch.int64, shapes["samples"]),
        "valid": (torch.bool, (B,)),
    }
    for name, (extra, dtype, shape) in _OPTIONAL.items():
        if getattr(extras, extra):
            fields[name] = (dtype, shapes[shape])
    return fields


def empty_sample(request: Request, extras: Extras) -> Sample:
    """Allocate a Sample for a launch to write to."""
    device = request.hidden.device
    fields = {
        name: torch.empty(*shape, dtype=dtype, device=device)
        for name, (dtype, shape) in sample_fields(request, extras).items()
    }
    return Sample(**fields)


class Score(NamedTuple):
    """The result of `score`, for one target per row or n. Fields that were not requested are None.

    A row is undefined if it has a NaN or +inf logit, no finite logit, or an invalid temperature.

    Attributes:
        logprob: fp32 [B] or [B, n], log softmax(logits / T) at the target; 0 for the target -100;
            NaN for another target that is out of range, and in an undefined row.
        logz: fp32 [B], log sum exp(logits / T); NaN in an undefined row.
        entropy: fp32 [B], -sum p log p of p = softmax(logits / T); NaN in an undefined row.
        rank: int32 in the shape of logprob, the number of tokens with a larger logit than the
            target; -1 where logprob is NaN and for the target -100.
        valid: bool in the shape of logprob; False where logprob is NaN.
    """

    logprob: Tensor
    logz: Tensor
    entropy: Tensor | None
    rank: Tensor | None
    valid: Tensor


class Screened(NamedTuple):
    """The result of `screened_sample`: some fields of Sample, and one more.

    Attributes:
        found: int32 [B], the number of candidates of a row whose exact logits were computed; -1 if
            those of all tokens were, because the candidates did not fit the buffer. None if the
            full kernel ran, because of several samples or log-probabilities.
    """

    tokens: Tensor
    valid: Tensor
    logprob: Tensor | None = None
    logz: Tensor | None = None
    found: Tensor | None = None


def empty_screened(B: int, device: torch.device) -> Screened:
    """Allocate a Screened for a launch to write to."""
    return Screened(
        torch.empty(B, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        found=torch.empty(B, dtype=torch.int32, device=device),
    )


class TruncatedSample(NamedTuple):
    """The result of `truncated_sample`. Fields that were not requested are None.

    Logits include penalties. logprob and top_logprob may have another temperature than the draw.
    Where T = 0 one token is kept, and log-probabilities are those of T = 1. In a row without a draw
    these are NaN, and the rank is -1.

    Attributes:
        tokens: int64 [B]; -1 in a row without a draw.
        valid: bool [B]; False for a row without a draw.
        kept: int32 [B], the number of tokens that the filters keep; 0 in a row without a draw.
        logprob: fp32 [B], log softmax(logits / T) at the token, over all tokens.
        kept_logprob: fp32 [B], the same over the kept tokens: the log of the probability with which
            the token was drawn.
        rank: int32 [B], the number of tokens, kept or not, with a larger logit than the drawn one.
        support: int64 [B, n], the kept tokens, larger logits first, lower tokens first among equal
            logits; -1 from the number of kept tokens on. All -1 in a row that keeps more than n.
        top_tokens, top_logprob: as in Sample, of all tokens, kept or not.
        found: int32 [B], the number of candidates of a row whose exact logits were computed; -1 if
            those of all tokens were. None unless a screened head served the call.
    """

    tokens: Tensor
    valid: Tensor
    kept: Tensor | None = None
    logprob: Tensor | None = None
    kept_logprob: Tensor | None = None
    rank: Tensor | None = None
    support: Tensor | None = None
    top_tokens: Tensor | None = None
    top_logprob: Tensor | None = None
    found: Tensor | None = None
