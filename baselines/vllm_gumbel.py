"""vLLM's sampler without FlashInfer: its Gumbel kernel, behind its Triton filters or a sort.

    in place: logits / T, min-p; top-k and top-p (a sort below 8 rows, else Triton); Gumbel argmax

How it is called, and its noise: `providing.vllm`. Not run yet: held to the source of vLLM 0.26.0 by
`make check-engines`.

Undefined rows, by reading: a NaN may win a block or not, so the token is arbitrary; a row of -inf
only gives a token at the start of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.baselines.providing.vllm import ABLE, build_with, sample
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


def build(problem: Problem, weight: Tensor) -> Launch:
    return build_with(problem, weight, flashinfer=False)


PROVIDER = Provider(
    name="vllm_gumbel",
    label="vLLM, Gumbel kernel",
    kind=Kind.EXACT,
    build=build,
    sample=sample,
    requires=("vllm",),
    capabilities=Capabilities(host_sync_free=True, **ABLE),
)
