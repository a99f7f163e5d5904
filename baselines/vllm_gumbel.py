"""vLLM's sampler without FlashInfer: its Gumbel kernel, behind its Triton filters or a sort.

    in place: logits / T, min-p; top-k and top-p (a sort below 8 rows, else Triton); Gumbel argmax

`providing.vllm` has the calls and the noise. `make check-engines` compares them with the source of
vLLM 0.26.0.

Undefined rows, by reading: a NaN may win a block or not, so the token is arbitrary; a row of -inf
only gives a token at the start of a block.
"""

from __future__ import annotations

from functools import partial

from fsbench.baselines.providing.vllm import ABLE, build_with, sample
from fsbench.provider import Capabilities, Kind, Provider

PROVIDER = Provider(
    name="vllm_gumbel",
    label="vLLM, Gumbel kernel",
    kind=Kind.EXACT,
    build=partial(build_with, flashinfer=False),
    sample=sample,
    requires=("vllm",),
    capabilities=Capabilities(host_sync_free=True, **ABLE),
)
