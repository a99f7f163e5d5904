"""akunu's one-launch sampler over stored logits, its approximations repaired.

cuBLAS, then one program per row, of 512 threads, not the 1024 of the text: so each has the
registers for eight loads of 16 bytes at once, and fewer of them share in a sum. With top-k it reads
the logits once, and then those that can be kept; without top-k, or where more than 4096 logits
reach the bound of the kth largest, it reads the row for every step of its search. The filters act
at T = 1, in akunu's order. Tokens follow the noise contract (token noise).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsbench.kernels.providing.filters import AKUNU_ORDER, draw_of_stored, launch_rows
from fsbench.kernels.providing.launches import noise_map
from fsbench.problem import FILTERS
from fsbench.provider import Capabilities, Kind, Provider

if TYPE_CHECKING:
    from torch import Tensor

NUM_WARPS = 16


def akunu_exact(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor,
    temperature: float,
    *,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """Draw a token per row of stored logits [B, V], contiguous, bf16, fp16 or fp32.

    Args:
        seed, offset: int64 [1]. temperature: >= 0; 0 is greedy.
        top_k, top_p, min_p: numbers, or all three int32 and fp32 [B].

    Returns:
        int64 [B]; -1 for a row with a NaN or +inf logit or without a finite one.
    """
    import torch
    import triton

    from fsbench.kernels.providing.akunu import PARTS, akunu_exact_kernel
    from fsbench.kernels.truncated.cutoff import GATHERED

    B, V = logits.shape
    tokens = torch.empty(B, dtype=torch.int64, device=logits.device)
    keys = torch.empty(B, GATHERED.value, dtype=torch.int64, device=logits.device)
    parts = torch.empty(B, PARTS.value, dtype=torch.int32, device=logits.device)
    wide = 16 // logits.element_size()
    turns = triton.next_power_of_2(triton.cdiv(V, PARTS.value * wide))
    launch_rows(
        akunu_exact_kernel, B, logits.device,
        logits, keys, parts, seed, offset, float(temperature), top_k, top_p, min_p, tokens, V,
        PER_ROW=isinstance(top_k, torch.Tensor), WIDE=wide, TURNS=turns,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return tokens


PROVIDER = Provider(
    name="akunu_exact",
    label="akunu, exact",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    capabilities=Capabilities(
        noise="token",
        zero_temperature=True,
        host_sync_free=True,
        batch_invariant=True,
        filters=FILTERS,
        mixed_filters=True,
        filter_order=AKUNU_ORDER,
    ),
    noise_map=noise_map,
    build=draw_of_stored(akunu_exact),
    presets=("truncated",),
)
