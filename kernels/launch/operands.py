"""A request as kernels take it: operands, shares of the work, and which numbers are of each row."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fsbench.kernels.configs.choice import tma_possible
from fsbench.kernels.configs.gpu import bind_and_launch, launching_on, multiprocessors
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.launch.request import SMALLEST, Request

WORDS_AT_ONCE = 128
"""Words of a packed mask that a program writes."""


class Operands(NamedTuple):
    """How a kernel loads the matrices, and the programs that share the work.

    load: (hidden, weight) -> both as the kernel takes them: descriptors, or the tensors.
    programs_v: that share the vocabulary, for each block of rows.
    grid: blocks of rows times programs_v.
    tiles: what a kernel must be compiled with for it.
    handed: fp32 numbers of scratch for sums that programs hand over (fused.hopper.split).
    """

    load: Callable[[Tensor, Tensor], tuple[Any, Any]]
    programs_v: int
    grid: tuple[int]
    tiles: dict[str, Any]
    handed: int = 0


def load_operands(hidden: Tensor, weight: Tensor, V: int, config: TileConfig) -> Operands:
    """How the portable kernel loads hidden [B, D] and the first V rows of weight."""
    use_tma = tma_possible(hidden, weight)
    blocks_b = triton.cdiv(hidden.shape[0], config.block_b)
    programs_v = vocab_programs(blocks_b, V, config.block_v, hidden.device, config.ctas_per_sm)

    def load(hidden: Tensor, weight: Tensor) -> tuple[Any, Any]:
        return (
            matrix_operand(hidden, config.block_b, config.block_d, use_tma),
            matrix_operand(weight, config.block_v, config.block_d, use_tma),
        )

    return Operands(
        load,
        programs_v,
        (blocks_b * programs_v,),
        {
            "BLOCK_B": config.block_b,
            "BLOCK_V": config.block_v,
            "BLOCK_D": config.block_d,
            "V_ON_M": config.v_on_m,
            "USE_TMA": use_tma,
            "FLATTEN": config.flatten,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        },
    )


def vocab_programs(
    blocks_b: int, V: int, block_v: int, device: torch.device, per_sm: int = 1
) -> int:
    """Programs that share the vocabulary, for each block of rows: one wave, none without a tile."""
    programs = multiprocessors(device) * per_sm
    return max(1, min(programs // blocks_b, triton.cdiv(V, block_v)))


class Address(NamedTuple):
    """What a descriptor needs of a tensor; it keeps no memory alive, so it may be cached."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def matrix_operand(
    matrix: Tensor, rows: int, cols: int, use_tma: bool
) -> Tensor | TensorDescriptor:
    """A descriptor for boxes [rows, cols], or the tensor where TMA cannot load it."""
    if not use_tma:
        return matrix
    if matrix.is_cpu:  # the interpreter reads the tensor
        return TensorDescriptor(matrix, [*matrix.shape], [matrix.shape[1], 1], [rows, cols])
    return _descriptor(matrix.data_ptr(), matrix.dtype, *matrix.shape, rows, cols)


@lru_cache(maxsize=4096)  # to check one takes longer than to find it
def _descriptor(
    address: int, dtype: torch.dtype, rows: int, cols: int, box_rows: int, box_cols: int
) -> Any:
    base = Address(address, dtype)
    return TensorDescriptor(base, [rows, cols], [cols, 1], [box_rows, box_cols])


class Processing(NamedTuple):
    """What a request does to the logits, as the kernels take it; mask is packed."""

    bias: Tensor | None
    row_bias: Tensor | None
    mask: Tensor | None
    mask_words: int


_AS_THEY_ARE = Processing(None, None, None, 0)


def processing(request: Request) -> Processing:
    """The biases and the mask of a request."""
    bias, mask = request.bias, request.mask
    if bias is None and mask is None:
        return _AS_THEY_ARE
    if mask is not None and mask.dtype == torch.bool:
        mask = pack_mask(mask)
    whole = bias is not None and bias.ndim == 2
    return Processing(
        None if whole else bias, bias if whole else None, mask, 0 if mask is None else mask.shape[1]
    )


def per_row(request: Request) -> dict[str, bool]:
    """Which numbers of a request are of each row, as the kernels are compiled for it."""
    return {
        "SEED_PER_ROW": request.seed.numel() > 1,
        "OFFSET_PER_ROW": request.offset is not None and request.offset.numel() > 1,
        "TEMPERATURE_PER_ROW": isinstance(request.temperature, Tensor),
    }


def scale_per_row(request: Request) -> bool:
    """Whether each token has a scale of its own."""
    return request.scale is not None and request.scale.ndim == 1


def greedy(request: Request) -> bool:
    """Whether all rows are: none of them needs noise."""
    temperature = request.temperature
    return not isinstance(temperature, Tensor) and temperature < SMALLEST


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
        grid = (B, triton.cdiv(words.shape[1], WORDS_AT_ONCE))
        sizes = {"V": V, "BLOCK": WORDS_AT_ONCE}
        bind_and_launch(_pack_mask_kernel, grid, mask_ptr=mask, words_ptr=words, **sizes)
    return words
