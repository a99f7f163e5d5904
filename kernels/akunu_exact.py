"""akunu's one-launch sampler over stored logits, without its approximations.

cuBLAS, then one program per row, of 512 threads instead of the 1024 of the text: each then has
registers for eight loads of 16 bytes at once, and a sum has fewer parts. With top-k it reads the
logits once, and then those that can be kept. Without top-k, or if more than 4096 logits reach the
bound of the kth largest, it reads the row for every step of its search. The filters act
at T = 1, in akunu's order. Tokens follow the noise contract (token noise).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsbench.kernels.providing.filters import AKUNU_ORDER, STORED_LOGITS, draw_of_stored, draw_rows
from fsbench.kernels.providing.launches import noise_map
from fsbench.provider import Kind, Provider, Tensor

NUM_WARPS = 16


def akunu_exact(
    logits: Tensor, seed: Tensor, offset: Tensor, temperature: float, **filters: Any
) -> Tensor:
    """Draw a token from each row of stored logits; see draw_rows."""
    import torch
    import triton

    from fsbench.kernels.providing.akunu import ROW_PARTS, akunu_exact_kernel
    from fsbench.kernels.truncated.cutoff import GATHERED

    wide = 16 // logits.element_size()
    scratch = [(GATHERED.value, torch.int64), (ROW_PARTS.value, torch.int32)]
    turns = triton.next_power_of_2(triton.cdiv(logits.shape[1], ROW_PARTS.value * wide))
    return draw_rows(
        akunu_exact_kernel, logits, seed, offset, temperature, scratch, **filters, WIDE=wide,
        TURNS=turns, num_warps=NUM_WARPS,
    )  # fmt: skip


PROVIDER = Provider(
    name="akunu_exact",
    label="akunu, exact",
    kind=Kind.TRUNCATED,
    requires=("triton",),
    capabilities=replace(STORED_LOGITS, filter_order=AKUNU_ORDER),
    noise_map=noise_map,
    build=draw_of_stored(akunu_exact),
    presets=("truncated",),
)
