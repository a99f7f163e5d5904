"""Kinds of draws: every call that the plug-in makes, so that its kernels can be compiled ahead."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench.integrations.draw import Draw, LogprobRequest, Rows
from fsbench.integrations.routing import MOST_LOGPROBS, Need
from fsbench.kernels import Penalties, TokenHistory

SIZES = (1, 2, 3, 5, 9, 17, 33, 64, 65, 128, 129, 193, 256, 257, 513, 769)
"""Batch sizes whose kernels cover those of all batch sizes, which a test checks."""

_TOP_K = 20  # of rows with filters; only Draw.screens makes kernels depend on it


class DrawKind(NamedTuple):
    """The properties of rows that decide the kernels of a draw, but for their number.

    Fields are named as in Rows.
    """

    filters: bool = False
    logprobs: LogprobRequest | None = None
    screened: bool = False
    bias: bool = False
    mask: bool = False
    penalties: bool = False
    raw_rows: bool = False

    @classmethod
    def from_rows(cls, rows: Rows) -> DrawKind:
        """Return the kind of a draw of these rows."""
        return cls(
            filters=rows.filters is not None,
            logprobs=rows.logprobs,
            screened=rows.screened,
            bias=rows.bias is not None,
            mask=rows.mask is not None,
            penalties=rows.penalties is not None,
            raw_rows=rows.raw_rows is not None,
        )

    @property
    def is_common(self) -> bool:
        """Whether this is a kind of most requests: without options, or with filters alone."""
        return self._replace(filters=False, screened=False) == DrawKind()


def served_kinds(supported: Need, raw: bool, screens: bool) -> list[DrawKind]:
    """Return the kinds of draws that group_rows leads to for a sampler, the most common first.

    Args:
        supported: what the sampler can do.
        raw: whether the engine reports log-probabilities of the raw logits.
        screens: whether filters may come from a screened head.
    """
    served = [DrawKind()]
    if supported & Need.FILTER:
        served.append(DrawKind(filters=True))
        if screens:
            served.append(DrawKind(filters=True, screened=True))
    logprobs: list[LogprobRequest | None] = [None]
    if supported & Need.LOGPROB:
        logprobs.append(LogprobRequest(0, raw))
        if supported & Need.TOP_LOGPROBS:
            logprobs.append(LogprobRequest(MOST_LOGPROBS, raw))
    for mask in (False, True) if supported & Need.MASK else (False,):
        for bias in (False, True) if supported & Need.BIAS else (False,):
            kind = DrawKind(mask=mask, bias=bias)
            served += [kind._replace(logprobs=each) for each in logprobs]
            if not supported & Need.FILTER:
                continue
            kind = kind._replace(filters=True)
            served += [kind._replace(logprobs=each) for each in logprobs]
            if raw and bias:
                served += [kind._replace(logprobs=each, raw_rows=True) for each in logprobs if each]
            if screens:
                served.append(kind._replace(screened=True))
            if supported & Need.REPETITION:
                kind = kind._replace(penalties=True)
                served += [
                    kind._replace(logprobs=each, raw_rows=each is not None and raw)
                    for each in logprobs
                ]
    return list(dict.fromkeys(served))


def example_rows(kind: DrawKind, hidden: Tensor, V: int) -> Rows:
    """Return rows of a kind for hidden states [B, D], with a request's neutral settings."""
    B, device = len(hidden), hidden.device
    make: Any = partial(torch.zeros, device=device, dtype=torch.float32)
    counters = torch.zeros(B, device=device, dtype=torch.int64)
    words = -(-V // 32)
    filters = penalties = None
    ones = make(B) + 1
    if kind.filters:
        top_k = torch.full((B,), _TOP_K, dtype=torch.int32, device=device)
        filters = top_k, torch.full_like(ones, 0.95), make(B)
    if kind.penalties:
        penalties = Penalties(
            TokenHistory(B, _TOP_K, device),
            repetition=ones.clone(),
            presence=make(B),
            frequency=make(B),
        )
    return Rows(
        hidden.contiguous(),
        ones,
        counters,
        counters.clone(),
        filters=filters,
        bias=make(B, V) if kind.bias else None,
        mask=make(B, words, dtype=torch.int32) - 1 if kind.mask else None,
        penalties=penalties,
        logprobs=kind.logprobs,
        raw_rows=torch.arange(B, device=device) if kind.raw_rows else None,
        screened=kind.screened,
    )


def warm(draw: Draw, kind: DrawKind, hidden: Tensor, V: int) -> None:
    """Draw rows of a kind once at each of SIZES, so that later draws compile and load nothing.

    Args:
        hidden: [B, D]; B is the largest batch.
    """
    for B in sorted({size for size in (*SIZES, len(hidden)) if size <= len(hidden)}, reverse=True):
        if not kind.screened or draw.screens(B, _TOP_K):
            draw(example_rows(kind, hidden[:B], V))
