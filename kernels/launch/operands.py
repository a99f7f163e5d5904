"""The arguments of kernels that a request determines: operands, grid, biases, mask, row flags."""

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
from fsbench.kernels.launch.request import Request

WORDS_AT_ONCE = 128
"""Words of a packed mask that a program writes."""


class Operands(NamedTuple):
    """The matrix operands and the grid of a launch.

    Attributes:
        load: (hidden, weight) -> the kernel's arguments for them: descriptors, or the tensors.
        programs_v: the programs that share the vocabulary, for each block of rows.
        grid: (blocks of rows times programs_v,).
        tiles: compile-time constants of the kernel.
        handed: fp32 numbers in the workspace for partial sums (fused.hopper.split).
        absent: Rows of the last block that hidden lacks, if TMA loads blocks of more than 64 rows.
    """

    load: Callable[[Tensor, Tensor], tuple[Any, Any]]
    programs_v: int
    grid: tuple[int]
    tiles: dict[str, Any]
    handed: int = 0
    absent: int = 0


def load_operands(hidden: Tensor, weight: Tensor, V: int, config: TileConfig) -> Operands:
    """Return the portable kernel's operands for hidden [B, D] and the first V rows of weight."""
    use_tma = tma_possible(hidden, weight)
    blocks_b = config.blocks(hidden.shape[0])
    programs_v = vocab_programs(blocks_b, V, config.block_v, hidden.device, config.ctas_per_sm)
    large = use_tma and config.block_b > 64

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
        absent=blocks_b * config.block_b - hidden.shape[0] if large else 0,
    )


def with_absent_rows(hidden: Tensor, noise: str, operands: Operands) -> Tensor:
    """Return hidden, with a row of zeros for each absent row if `noise` is "token".

    Boxes that reach far beyond hidden take TMA long: with token noise, a block of 256 rows takes
    872 us with 129 rows, and 510 with 127 rows of zeros (D = 4096, H200). The caller keeps the
    result until the launch, since a descriptor does not.
    """
    if noise != "token" or not operands.absent:
        return hidden
    return torch.nn.functional.pad(hidden, (0, 0, 0, operands.absent))


def vocab_programs(
    blocks_b: int, V: int, block_v: int, device: torch.device, per_sm: int = 1
) -> int:
    """Return how many programs share the vocabulary: one wave, and at least one tile for each."""
    programs = multiprocessors(device) * per_sm
    return max(1, min(programs // blocks_b, triton.cdiv(V, block_v)))


class Address(NamedTuple):
    """The address and dtype of a tensor for a descriptor, which does not keep the tensor alive."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def matrix_operand(
    matrix: Tensor, rows: int, cols: int, use_tma: bool
) -> Tensor | TensorDescriptor:
    """Return a descriptor for boxes [rows, cols], or the tensor if TMA cannot load it."""
    if not use_tma:
        return matrix
    if matrix.is_cpu:  # the interpreter reads the tensor
        return TensorDescriptor(matrix, [*matrix.shape], [matrix.shape[1], 1], [rows, cols])
    return _descriptor(matrix.data_ptr(), matrix.dtype, *matrix.shape, rows, cols)


@lru_cache(maxsize=4096)  # constructing a descriptor takes longer than looking it up
def _descriptor(
    address: int, dtype: torch.dtype, rows: int, cols: int, box_rows: int, box_cols: int
) -> Any:
    base = Address(address, dtype)
    return TensorDescriptor(base, [rows, cols], [cols, 1], [box_rows, box_cols])


class Processing(NamedTuple):
    """The biases and the packed mask of a request: arguments of kernels."""

    bias: Tensor | None
    row_bias: Tensor | None
    mask: Tensor | None
    mask_words: int


_NO_PROCESSING = Processing(None, None, None, 0)


def processing(request: Request) -> Processing:
    """Return the biases and the mask of a request, packed if it is a bool mask."""
    bias, mask = request.bias, request.mask
    if bias is None and mask is None:
        return _NO_PROCESSING
    if mask is not None and mask.dtype == torch.bool:
        mask = pack_mask(mask)
    by_row = bias is not None and bias.ndim == 2
    words = 0 if mask is None else mask.shape[1]
    return Processing(None if by_row else bias, bias if by_row else None, mask, words)


def per_row(request: Request) -> dict[str, bool]:
    """Return the compile-time flags of inputs with one value for each row."""
    return {
        "SEED_PER_ROW": request.seed.numel() > 1,
        "OFFSET_PER_ROW": request.offset is not None and request.offset.numel() > 1,
        "TEMPERATURE_PER_ROW": isinstance(request.temperature, Tensor),
    }


def scale_per_row(request: Request) -> bool:
    """Return whether each token has a scale."""
    return request.scale is not None and request.scale.ndim == 1


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
    """Pack bool [B, V] into int32 [B, ceil(V / 32)], token v in bit v % 32 of word v // 32."""
    B, V = mask.shape
    words = torch.empty(B, triton.cdiv(V, 32), dtype=torch.int32, device=mask.device)
    with launching_on(mask.device):
        grid = (B, triton.cdiv(words.shape[1], WORDS_AT_ONCE))
        sizes = {"V": V, "BLOCK": WORDS_AT_ONCE}
        bind_and_launch(_pack_mask_kernel, grid, mask_ptr=mask, words_ptr=words, **sizes)
    return words
