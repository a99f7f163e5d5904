"""Ablation: FlashSampling that also writes its logits to memory, in fp32 (Table 9 of the paper).

The kernel is flash_sampling's with one store per tile more, so the difference in time is what the
logits cost when they leave the chip: 4 B V bytes, a share of 2 B / D of the weight's 2 V D.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from fsbench.kernels._device import launching_on
from fsbench.kernels._epilogue import best_of_tile, processed
from fsbench.kernels._flash_sampling_config import TileConfig
from fsbench.kernels._helper import LOWEST_KEY, take_keys, token_of_key
from fsbench.kernels._mainloop import program_share, tile_logits
from fsbench.kernels._provider import WorkspaceLaunch, noise_map
from fsbench.kernels._stored_logits import store_logits
from fsbench.kernels._workspace import workspace
from fsbench.problem import Problem
from fsbench.provider import Capabilities, Kind, Launch, Provider

if TYPE_CHECKING:
    from torch import Tensor


@triton.jit(do_not_specialize=["B", "V"])
def _flash_sampling_store_kernel(
    hidden,  # [B, D] descriptor (USE_TMA) or pointer
    weight,  # [V, D] descriptor (USE_TMA) or pointer
    seed_ptr,  # [1] int64
    offset_ptr,  # [1] int64
    temperature,  # fp32, above 0
    keys_ptr,  # [>= B] int64, LOWEST_KEY between calls
    arrivals_ptr,  # [>= B] int32, 0 between calls
    tokens_ptr,  # [B] int64, out
    logits_ptr,  # [B, V] fp32, out
    B,
    V,
    D,
    BLOCK_B: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    V_ON_M: tl.constexpr,
    USE_TMA: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    pid_b, pid_v, programs_v = program_share(B, BLOCK_B)
    b0 = pid_b * BLOCK_B
    rows = b0 + tl.arange(0, BLOCK_B)
    seed = tl.load(seed_ptr)
    offset = tl.load(offset_ptr)
    T = tl.full((1, 1), temperature, tl.float32)

    best = tl.full((BLOCK_B, 4), LOWEST_KEY, tl.int64)
    unused = tl.zeros((BLOCK_B, 4), tl.float32)
    for tile_v in tl.range(pid_v, tl.cdiv(V, BLOCK_V), programs_v, flatten=FLATTEN):
        v0 = tile_v * BLOCK_V
        logits = tile_logits(
            hidden, weight, b0, v0, v0, B, V, D, BLOCK_B, BLOCK_V, BLOCK_D, V_ON_M, USE_TMA
        )
        store_logits(logits_ptr, logits, rows, v0, B, V)
        logits = processed(logits, rows, v0, B, V, None, None, None, None)
        best, unused = best_of_tile(
            logits, v0, rows[:, None], seed, offset, T, 1.0 / T, 0, best, unused,
            1, "group", False, False,
        )  # fmt: skip

    tl.atomic_max(keys_ptr + rows, tl.max(best, axis=1), mask=rows < B)
    tl.debug_barrier()
    if tl.atomic_add(arrivals_ptr + pid_b, 1) == programs_v - 1:
        tl.atomic_xchg(arrivals_ptr + pid_b, 0)
        token = token_of_key(take_keys(keys_ptr, rows, rows < B))
        tl.store(tokens_ptr + rows, token.to(tl.int64), mask=rows < B)


def flash_sampling_store(
    hidden: Tensor,
    weight: Tensor,
    *,
    temperature: float,
    seed: Tensor,
    offset: Tensor,
    config: TileConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(tokens int64 [B], logits fp32 [B, V]): flash_sample's, with the logits it drew them from.

    Arguments are those of fsbench.kernels.flash_sample (seed and offset of shape [1], temperature
    above 0), which checks them; this does not.
    """
    import torch

    from fsbench.kernels._choice import default_config
    from fsbench.kernels._launch import load_operands

    B, D = hidden.shape
    V = weight.shape[0]
    config = config or default_config(B, D, hidden.device, hidden.element_size())
    operands = load_operands(hidden, weight, V, config)
    work = workspace(B, hidden.device)
    tokens = torch.empty(B, dtype=torch.int64, device=hidden.device)
    logits = torch.empty(B, V, dtype=torch.float32, device=hidden.device)
    with launching_on(hidden.device):
        _flash_sampling_store_kernel[operands.grid](
            operands.hidden,
            operands.weight,
            seed,
            offset,
            float(temperature),
            work.keys,
            work.arrivals,
            tokens,
            logits,
            B,
            V,
            D,
            **operands.tiles,
        )
    return tokens, logits


def build(problem: Problem, weight: Tensor) -> Launch:
    """See Provider."""
    return _FlashSamplingStore(problem, weight)


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
    build=build,
)
