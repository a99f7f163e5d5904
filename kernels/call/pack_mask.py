"""A mask of bools as the words that the kernels read: one bit per token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels.configs.gpu import bind_and_launch, launching_on

BLOCK = 128  # words per program


@triton.jit
def _pack_mask_kernel(
    mask_ptr,  # [B, V] bool
    words_ptr,  # [B, ceil(V / 32)] int32, out
    V,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    words = tl.cdiv(V, 32)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)[None, :]
    token = word[:, None] * 32 + bit
    allowed = tl.load(mask_ptr + row * V + token, mask=token < V, other=0)
    tl.store(
        words_ptr + row * words + word,
        tl.sum(allowed.to(tl.int32) << bit, axis=1),
        mask=word < words,
    )


def pack_mask(mask: Tensor) -> Tensor:
    """bool [B, V] -> int32 [B, ceil(V / 32)], token v in bit v % 32 of word v // 32."""
    B, V = mask.shape
    words = torch.empty(B, triton.cdiv(V, 32), dtype=torch.int32, device=mask.device)
    with launching_on(mask.device):
        grid = (B, triton.cdiv(words.shape[1], BLOCK))
        bind_and_launch(_pack_mask_kernel, grid, mask_ptr=mask, words_ptr=words, V=V, BLOCK=BLOCK)
    return words
