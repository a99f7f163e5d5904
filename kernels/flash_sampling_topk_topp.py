"""FlashSampling with top-k, top-p and min-p: draw from all tokens, and again if that is cut off.

The fused kernel draws its token and writes each logit once, with the largest of every 32. The
kernels after it read only logits that can be kept (truncated.select): they keep the token if the
filters do, else they draw from the kept tokens. This is not the scheme of the paper's appendix D.6,
which keeps the k largest logits of every tile (docs/design/log.md compares them).
"""

from __future__ import annotations

from fsbench.kernels.providing import truncated
from fsbench.kernels.providing.launches import accept, noise_map
from fsbench.provider import Kind, Provider

PROVIDER = Provider(
    name="flash_sampling_topk_topp",
    label="FlashSampling, top-k/top-p/min-p",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    capabilities=truncated.CAPABILITIES,
    noise_map=noise_map,
    supports=truncated.unsupported_reason,
    build=truncated.TruncatedLaunch,
    sample=truncated.sample,
    accept=accept,
    call="truncated_sample",
    presets=("truncated",),
)
