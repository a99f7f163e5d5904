"""`noise_map`: the map from random bits to noise alone, for Provider.noise_map and verification."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.configs.gpu import bind_and_launch, launching_on
from fsbench.kernels.noise.contract import exponential, gumbel

CODES_AT_ONCE = 4096


@triton.jit(do_not_specialize=["n"])
def _noise_map_kernel(codes_ptr, exponential_ptr, gumbel_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(codes_ptr + offs, mask=offs < n, other=0).to(tl.uint32)
    tl.store(exponential_ptr + offs, exponential(bits), mask=offs < n)
    tl.store(gumbel_ptr + offs, gumbel(bits), mask=offs < n)


def noise_map(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Map 32-bit codes, int64 [n], to (Exp(1), Gumbel(0, 1)), fp32 [n] each, as kernels do."""
    values = torch.empty(2, len(codes), dtype=torch.float32, device=codes.device)
    with launching_on(codes.device):
        grid = (triton.cdiv(len(codes), CODES_AT_ONCE),)
        bind_and_launch(
            _noise_map_kernel,
            grid,
            codes_ptr=codes,
            exponential_ptr=values[0],
            gumbel_ptr=values[1],
            n=len(codes),
            BLOCK=CODES_AT_ONCE,
            num_warps=4,
        )
    return values[0], values[1]
