"""What stands in an engine's place of LM head and sampler: one function, whoever draws.

`flash_sample` is what an engine should run: every request has its own temperature and seed, and
zeros are greedy rows. Any other name is an exact sampler of `fsbench list`, put into the engine to
be compared with: it draws as `fsbench run` times it, at T = 1 and with one seed for the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fsbench.discover import available, discover, select
from fsbench.errors import InvalidArgument, unknown_name
from fsbench.kernels import VocabShard, flash_sample
from fsbench.problem import Problem
from fsbench.provider import Kind, Launch, Provider

FLASH_SAMPLE = "flash_sample"

DRAW_MARK, MATMUL_MARK = "fsbench: draw", "fsbench: LM head"
"""Ranges in torch profiles: LM head and sampling together, and the LM head, where it is apart."""


@dataclass(frozen=True)
class Head:
    """An LM head. weight: [vocab_size or more, D], or this rank's shard of it.

    soft_cap: logits become c tanh(logits / c), or None.
    """

    weight: Tensor | VocabShard
    vocab_size: int
    soft_cap: float | None = None


class Draw(Protocol):
    """LM head and sampling of one decode step.

    Args of the call:
        hidden: [B, D], contiguous.
        temperature: fp32 [B]; 0 is greedy.
        seed: int64 [B], one per request.
        offset: int64 [B], or [1] if it is the same of all: the position of the token fed.

    Returns:
        [B] token ids; -1 where a row has no draw, if the sampler can tell.
    """

    def declines(self, temperature: np.ndarray) -> str | None:
        """None if it can serve a batch with these temperatures [B], else why not."""

    def __call__(self, hidden: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        """Tokens [B]."""


def known() -> dict[str, tuple[str, bool]]:
    """Every name that `make_draw` takes -> (label for legends, whether logits stay on chip)."""
    found = {FLASH_SAMPLE: ("FlashSampling", True)}
    for name, entry in discover().items():
        if entry.provider is not None and entry.provider.kind is Kind.EXACT:
            found[name] = (entry.provider.label, entry.provider.capabilities.fused)
    return found


def missing(name: str, device: str) -> str | None:
    """None if this sampler can run on `device` (cuda or cpu), else why not.

    On a CPU flash_sample runs its reference, and says so.

    Raises:
        InvalidArgument: nobody knows the name, or it is no exact sampler.
    """
    if name == FLASH_SAMPLE:
        return None
    names = known()
    if name not in names:
        raise unknown_name("sampler", name, names)
    return discover()[name].unavailable_reason(device)


def make_draw(name: str, head: Head) -> Draw:
    """The sampler of this name over an LM head.

    Raises:
        InvalidArgument: nobody knows the name; or it is not flash_sample, and the head is sharded
            or has a soft cap.
        ProviderUnavailable: it cannot run here.
    """
    if name == FLASH_SAMPLE:
        return FlashSampleDraw(head)

    names = known()
    if name not in names:
        raise unknown_name("sampler", name, names)
    matrix = head.weight.weight if isinstance(head.weight, VocabShard) else head.weight
    (found,) = select(discover(), [name])
    return ProviderDraw(available(found, matrix.device.type), head)


class FlashSampleDraw:
    """See Draw. All that flash_sample can do for a request, in one launch."""

    def __init__(self, head: Head):
        self._head = head

    def declines(self, temperature: np.ndarray) -> str | None:
        return None

    def __call__(self, hidden: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        weight = self._head.weight
        return flash_sample(
            hidden,
            weight,
            temperature=temperature,
            seed=seed,
            offset=offset,
            soft_cap=self._head.soft_cap,
            vocab_size=None if isinstance(weight, VocabShard) else self._head.vocab_size,
        ).tokens


class ProviderDraw:
    """See Draw. A sampler as `fsbench run` builds it, for comparison.

    Raises:
        InvalidArgument: the head is sharded or has a soft cap, which a Problem does not describe.
    """

    def __init__(self, provider: Provider, head: Head):
        if not isinstance(head.weight, torch.Tensor) or head.soft_cap is not None:
            raise InvalidArgument(
                f"{provider.name}: expected a whole LM head without a soft cap; only "
                f"{FLASH_SAMPLE} takes others"
            )
        self._provider = provider
        self._weight = head.weight[: head.vocab_size]
        self._launch = cache(self._build)

    def declines(self, temperature: np.ndarray) -> str | None:
        return None if (temperature == 1).all() else "temperature"

    def __call__(self, hidden: Tensor, temperature: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        return self._launch(hidden.shape[0])(hidden, seed[:1], offset[:1])

    def _build(self, B: int) -> Launch:
        V, D = self._weight.shape
        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
        dtype = names[self._weight.dtype]
        return self._provider.build(
            Problem(B, D, V, dtype, device=self._weight.device.type), self._weight
        )
