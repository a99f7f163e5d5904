"""FlashSampling with top-k, top-p and min-p: draw from all tokens, and again if that is cut off.

Section D.6 of the FlashSampling paper shows that filters can be applied to the candidates of tiles;
for k = 50 the candidates would have more bytes than the logits. Here the fused kernel draws its
token and writes each logit once, with the largest of every 32. The kernels after it read only
logits that can be kept (truncated.select): they keep the token if the filters do, else they draw
from the kept tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsbench.kernels.providing.launches import accept, noise_map
from fsbench.kernels.providing.truncated import CAPABILITIES, TruncatedLaunch, unsupported_reason
from fsbench.provider import Kind, Provider

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.launch.result import TruncatedSample


def sample(hidden: Tensor, weight: Tensor, **options: Any) -> TruncatedSample:
    from fsbench.kernels.truncated.api import truncated_sample

    return truncated_sample(hidden, weight, **options)


PROVIDER = Provider(
    name="flash_sampling_topk_topp",
    label="FlashSampling, top-k/top-p/min-p",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    capabilities=CAPABILITIES,
    noise_map=noise_map,
    supports=unsupported_reason,
    build=TruncatedLaunch,
    sample=sample,
    accept=accept,
    call="truncated_sample",
    presets=("truncated",),
)
