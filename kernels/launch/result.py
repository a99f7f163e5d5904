"""What the public calls return."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fsbench.kernels.launch.request import Request


class Sample(NamedTuple):
    """What flash_sample returns; the shapes are those of one sample per row, or of n.

    tokens: int64 [B] or [B, n]; -1 in a row that has no draw.
    valid: bool [B]; False for a row that has no draw.
    logprob: fp32 [B] or [B, n], or None if not asked for: log softmax(logits / T) at the token.
    logz: fp32 [B], or None: log sum exp(logits / T).
    entropy: fp32 [B], or None: -sum p log p of p = softmax(logits / T).
    rank: int32 [B] or [B, n], or None: how many tokens have a larger logit than the drawn one.
        One with the same logit does not count.
    top_tokens: int64 [B, k], or None: the tokens of the k largest logits, in this order, of equal
        ones the lower first; -1 from the number of allowed tokens on.
    top_logprob: fp32 [B, k], or None: their log-probabilities, and -inf where there is no token.

    Where T = 0 the token is the argmax, and log-probabilities, logz and entropy are those of T = 1.
    In a row without a draw these are NaN, and ranks and tokens are -1.
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
    """What a draw returns beside tokens: which fields of Sample; top: how many of top_tokens."""

    logprob: bool = False
    logz: bool = False
    entropy: bool = False
    rank: bool = False
    top: int = 0


NO_EXTRAS = Extras()

_OPTIONAL = {
    "logprob": ("logprob", torch.float32, "samples"),
    "logz": ("logz", torch.float32, "rows"),
    "entropy": ("entropy", torch.float32, "rows"),
    "rank": ("rank", torch.int32, "samples"),
    "top_tokens": ("top", torch.int64, "top"),
    "top_logprob": ("top", torch.float32, "top"),
}
"""Of each optional field of Sample: the field of Extras that asks for it, dtype, and shape."""


def sample_fields(
    request: Request, wanted: Extras
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtype and shape of each field of Sample that is wanted."""
    B, n = request.hidden.shape[0], request.num_samples
    shapes = {"samples": (B,) if n == 1 else (B, n), "rows": (B,), "top": (B, wanted.top)}
    found: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tokens": (torch.int64, shapes["samples"]),
        "valid": (torch.bool, (B,)),
    }
    for name, (extra, dtype, shape) in _OPTIONAL.items():
        if getattr(wanted, extra):
            found[name] = (dtype, shapes[shape])
    return found


def empty_sample(request: Request, wanted: Extras) -> Sample:
    """A Sample for a launch to write to."""
    device = request.hidden.device
    if wanted == NO_EXTRAS and request.num_samples == 1:  # as most
        B = request.hidden.shape[0]
        tokens = torch.empty(B, dtype=torch.int64, device=device)
        return Sample(tokens, torch.empty(B, dtype=torch.bool, device=device))
    fields = {
        name: torch.empty(*shape, dtype=dtype, device=device)
        for name, (dtype, shape) in sample_fields(request, wanted).items()
    }
    return Sample(**fields)


class Score(NamedTuple):
    """What score returns; the shapes are those of one target per row, or of n.

    logprob: fp32 [B] or [B, n]: log softmax(logits / T) at the target; 0 where that is -100, NaN
        where there is none.
    logz: fp32 [B]: log sum exp(logits / T); NaN in a row that is undefined.
    entropy: fp32 [B], or None if not asked for: -sum p log p of p = softmax(logits / T); NaN in a
        row that is undefined.
    rank: int32, of the shape of logprob, or None if not asked for: how many tokens have a larger
        logit than the target; one with the same logit does not count. -1 where there is none, and
        where the target is -100.
    valid: bool, of the shape of logprob; False where logprob is NaN: the target is out of range, or
        the row has a NaN or +inf logit, no finite one, or a temperature that is none.
    """

    logprob: Tensor
    logz: Tensor
    entropy: Tensor | None
    rank: Tensor | None
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


def empty_screened(B: int, device: torch.device) -> Screened:
    """A result of screened_sample for a launch to write to."""
    return Screened(
        torch.empty(B, dtype=torch.int64, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
        found=torch.empty(B, dtype=torch.int32, device=device),
    )


class TruncatedSample(NamedTuple):
    """What truncated_sample returns.

    tokens: int64 [B]; -1 in a row that has no draw.
    valid: bool [B]; False for a row that has no draw.
    kept: int32 [B], or None if not asked for: how many tokens the filters keep; 0 in a row without
        a draw.
    logprob: fp32 [B], or None: log softmax(logits / T) at the token, over all tokens.
    kept_logprob: fp32 [B], or None: the same over what the filters keep, so the logarithm of the
        probability with which the token was drawn.
    rank: int32 [B], or None: how many of all tokens have a larger logit than the drawn one. One
        with the same logit does not count.
    support: int64 [B, n], or None: the kept tokens, larger logits first, of equal ones the lower
        first; -1 from the number of kept tokens on. All -1 in a row that keeps more than n.
    top_tokens, top_logprob: as in Sample, or None: of all tokens, whatever the filters keep.
    found: int32 [B], or None unless a screened head served the call: tokens of a row that the
        filters might keep, whose exact logits were computed; -1 if those of all tokens were.

    Logits are those with penalties. logprob and top_logprob may be those of another temperature.
    Where T = 0 one token is kept, and log-probabilities are those of T = 1. In a row without a draw
    these are NaN, and the rank is -1.
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
