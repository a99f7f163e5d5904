"""vLLM's sampler as it ships: filters by FlashInfer, plain requests by its Gumbel kernel.

    logits / T and min-p in place, then FlashInfer's sampler of probabilities or of logits

vLLM uses FlashInfer if a request of the batch has top-k or top-p, and no request is greedy or has a
seed. The random numbers are then those of torch's generator, which the host reads in every launch:
a captured graph would repeat its draws, and vLLM captures none. `providing.vllm` has the calls.
`make check-engines` compares them with the source of vLLM 0.26.0.

Undefined rows, by reading: as `vllm_gumbel`, and as `flashinfer_top_k_top_p` with filters.
"""

from __future__ import annotations

from functools import partial

from fsbench.baselines.providing.vllm import ABLE, build_with, sample
from fsbench.provider import Capabilities, Kind, Provider

PROVIDER = Provider(
    name="vllm_flashinfer",
    label="vLLM, FlashInfer",
    kind=Kind.EXACT,
    build=partial(build_with, flashinfer=True),
    sample=sample,
    requires=("vllm", "flashinfer"),
    capabilities=Capabilities(graph_safe=False, **ABLE),
)
