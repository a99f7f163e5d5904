"""Ablation: FlashSampling that also writes its logits to memory, in fp32 (Table 9 of the paper).

The kernel is that of flash_sampling with a store for each tile. The difference in time is the cost
of writing the logits: 4 B V bytes, a share of 2 B / D of the weight's 2 V D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.kernels.providing.launches import WorkspaceLaunch, noise_map
from fsbench.provider import Capabilities, Kind, Provider

if TYPE_CHECKING:
    from torch import Tensor

    from fsbench.kernels.configs.hopper import HopperConfig
    from fsbench.kernels.configs.portable import TileConfig


def flash_sampling_store(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float,
    seed: Tensor,
    offset: Tensor,
    config: TileConfig | HopperConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens, int64 [B], as flash_sample does, and return the logits, fp32 [B, V], too.

    Arguments are those of fsbench.kernels.flash_sample (seed and offset of shape [1], temperature
    above 0), without its checks. The stride of the logits is a multiple of 128.
    """
    import torch

    from fsbench.kernels.device.stored_logits import allocate
    from fsbench.kernels.fused.launch import launch
    from fsbench.kernels.launch.request import Request
    from fsbench.kernels.launch.result import Sample

    B, V = hidden.shape[0], weight.shape[0]
    request = Request(
        hidden, weight, seed, offset, temperature, None, None, None, V, 1, "group"
    )  # fmt: skip
    tokens = torch.empty(B, dtype=torch.int64, device=hidden.device)
    valid = torch.empty(B, dtype=torch.bool, device=hidden.device)
    stored = allocate(B, V, hidden.device, largest=False)
    launch(request, "auto", config, Sample(tokens, valid, None, None), stored)
    return tokens, stored.logits[:, :V]


class _FlashSamplingStore(WorkspaceLaunch):
    def __call__(self, hidden: Tensor, seed: Tensor, offset: Tensor) -> Tensor:
        tokens, _ = flash_sampling_store(
            hidden, self._weight, temperature=self._temperature, seed=seed, offset=offset
        )
        return tokens


PROVIDER = Provider(
    name="flash_sampling_store",
    label="FlashSampling + logits store",
    kind=Kind.EXACT,
    requires=("triton",),
    noise_map=noise_map,
    capabilities=Capabilities(noise="group", host_sync_free=True, batch_invariant=True),
    build=_FlashSamplingStore,
)
