"""Exact sampling by an int8 screen: about half of the bytes of the weight (docs/screened-head.md).

An int8 copy of the head gives every logit within a proven bound; the few tokens that may win are
computed from the weight, in the order of the fused kernels. Tokens are those of
flash_sampling_token. Three launches. The copy takes half of the weight's memory once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.kernels._flash_sample import Sample
from fsbench.kernels._provider import noise_map
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels._screened_head import ScreenedHead


class _Screened:
    """See Launch."""

    def __init__(self, head: ScreenedHead, temperature: float):
        self._head = head
        self._temperature = temperature

    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        from fsbench.kernels._screened_sample import screened_sample

        return screened_sample(
            hidden, self._head, temperature=self._temperature, seed=seed, offset=offset
        ).tokens


def build(problem: Problem, weight: Tensor) -> Launch:
    """See Provider."""
    from fsbench.kernels._screened_head import prepare_head

    return _Screened(prepare_head(weight), problem.temperature)


def sample(hidden: Tensor, weight: Tensor, **options: Any) -> Sample:
    """See Provider. It prepares the head at every call."""
    from fsbench.kernels._screened_head import prepare_head
    from fsbench.kernels._screened_sample import screened_sample

    drawn = screened_sample(hidden, prepare_head(weight), **options)
    return Sample(drawn.tokens, drawn.valid)


PROVIDER = Provider(
    name="flash_sampling_screened",
    label="FlashSampling, screened head",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=Capabilities(
        noise="token",
        zero_temperature=True,
        fused=True,
        host_sync_free=True,
        batch_invariant=True,
        per_row_temperature=True,
        greedy_rows=True,
        bias=True,
        mask=True,
        per_request_seed=True,
    ),
    build=build,
    sample=sample,
)
