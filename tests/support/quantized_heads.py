"""Helpers for tests of quantized heads."""

from __future__ import annotations

from torch import Tensor

from fsbench.problem import Problem
from fsbench.provider import Provider, QuantizedWeight


def form_of(provider: Provider) -> str:
    """A form of heads that are quantized, of a sampler that takes nothing else; or ""."""
    refused = provider.supports(Problem(1, 16, 64, provider.capabilities.dtypes[0]))
    return provider.capabilities.quantized[0] if refused else ""


def numbers(head: QuantizedWeight) -> Tensor:
    """Its numbers, [V, D] fp32."""
    return head.weight.float() * head.scale[:, None]
