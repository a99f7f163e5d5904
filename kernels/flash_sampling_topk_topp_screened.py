"""FlashSampling with top-k, top-p and min-p from a screened head (screened-head.md).

An int8 copy of the head gives an upper bound of every logit. Tokens that may be among the k largest
are computed from the weight; the kernels that filter stored logits filter these. Tokens are those
of flash_sampling_topk_topp with token noise. Without top-k, or above 16 rows, it is that sampler.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fsbench.kernels.providing import screened, truncated
from fsbench.kernels.providing.launches import accept, noise_map
from fsbench.problem import Problem
from fsbench.provider import Kind, Provider


def unsupported_reason(problem: Problem) -> str | None:
    return truncated.unsupported_reason(problem) or screened.unsupported_reason(problem)


PROVIDER = Provider(
    name="flash_sampling_topk_topp_screened",
    label="FlashSampling, top-k/top-p/min-p, screened head",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    # Those that the screen has; with others it is flash_sampling_topk_topp.
    capabilities=replace(
        truncated.CAPABILITIES, noise="token", logprob=False, rank=False, penalties=False
    ),
    noise_map=noise_map,
    supports=unsupported_reason,
    build=partial(truncated.TruncatedLaunch, screened=True),
    sample=partial(truncated.sample, screened=True),
    accept=accept,
    call="truncated_sample",
    kept_bytes=screened.kept_bytes,
)
