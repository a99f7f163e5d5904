"""Kinds of draws: all that a plug-in launches, so that it can be compiled before it is served."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench.integrations.draw import Draw, LogprobRequest, Rows, history
from fsbench.integrations.routing import MOST_LOGPROBS, Need
from fsbench.kernels import Penalties

SIZES = (1, 2, 3, 5, 9, 17, 33, 64, 65, 129, 193, 257, 513, 769)
"""Batch sizes whose kernels are those of all batch sizes; a test compares them with all."""

_TOP_K = 20  # of rows with filters; the kernels depend on it by Draw.screens alone


class DrawKind(NamedTuple):
    """Everything but the number of rows that decides the kernels of a draw; fields as in Rows."""

    filters: bool = False
    asked: LogprobRequest | None = None
    screened: bool = False
    bias: bool = False
    mask: bool = False
    penalties: bool = False
    apart: bool = False

    @classmethod
    def of(cls, rows: Rows) -> DrawKind:
        """Return the kind of a draw of these rows."""
        return cls(
            filters=rows.filters is not None,
            asked=rows.asked,
            screened=rows.screened,
            bias=rows.bias is not None,
            mask=rows.mask is not None,
            penalties=rows.penalties is not None,
            apart=rows.apart is not None,
        )

    @property
    def is_common(self) -> bool:
        """Whether most requests are of this kind: plain ones, and those with filters."""
        return self._replace(filters=False, screened=False) == DrawKind()


def served_kinds(able: Need, raw: bool, screens: bool) -> list[DrawKind]:
    """Return the kinds of draws that routing makes for a sampler, the most common first.

    Args:
        able: what the sampler can do.
        raw: whether the engine reports log-probabilities of the raw logits.
        screens: whether filters may come from a screened head.
    """
    kinds = [DrawKind()]
    if able & Need.FILTER:
        kinds.append(DrawKind(filters=True))
        if screens:
            kinds.append(DrawKind(filters=True, screened=True))
    asked: list[LogprobRequest | None] = [None]
    if able & Need.LOGPROB:
        asked.append(LogprobRequest(0, raw))
        if able & Need.TOP_LOGPROBS:
            asked.append(LogprobRequest(MOST_LOGPROBS, raw))
    for mask in (False, True) if able & Need.MASK else (False,):
        for bias in (False, True) if able & Need.BIAS else (False,):
            kind = DrawKind(mask=mask, bias=bias)
            kinds += [kind._replace(asked=each) for each in asked]
            if not able & Need.FILTER:
                continue
            kind = kind._replace(filters=True)
            kinds += [kind._replace(asked=each) for each in asked]
            if raw and bias:
                kinds += [kind._replace(asked=each, apart=True) for each in asked if each]
            if screens:
                kinds.append(kind._replace(screened=True))
            if able & Need.REPETITION:
                kind = kind._replace(penalties=True)
                kinds += [
                    kind._replace(asked=each, apart=each is not None and raw) for each in asked
                ]
    return list(dict.fromkeys(kinds))


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
        empty = partial(make, dtype=torch.int32)
        penalties = Penalties(
            history(empty(B, words), empty(B, V), _TOP_K),
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
        asked=kind.asked,
        apart=torch.arange(B, device=device) if kind.apart else None,
        screened=kind.screened,
    )


def warm(draw: Draw, kind: DrawKind, hidden: Tensor, V: int) -> None:
    """Draw rows of a kind once at each batch size up to that of hidden [*, D] that has its kernels.

    So a later draw of this kind compiles nothing and loads nothing, whatever its batch size.
    """
    most = len(hidden)
    for B in sorted({size for size in (*SIZES, most) if size <= most}, reverse=True):
        if not kind.screened or draw.screens(B, _TOP_K):
            draw(example_rows(kind, hidden[:B], V))
