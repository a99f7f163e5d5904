"""The operands of a launch of the Hopper kernel."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsbench.kernels.configs.hopper import CHUNK, ROWS, HopperConfig
from fsbench.kernels.fused.hopper.kernel import hopper_kernel
from fsbench.kernels.launch.operands import Address, Operands, vocab_programs

__all__ = ["hopper_kernel", "operands"]


def operands(hidden: Tensor, weight: Tensor, V: int, config: HopperConfig) -> Operands:
    """Return the operands of the Hopper kernel for hidden [B, D] and the first V rows of weight."""
    B = hidden.shape[0]
    box_rows, boxes = config.boxes(B)
    blocks_b = config.blocks(B)
    programs_v = vocab_programs(blocks_b, V, config.block_v, hidden.device)
    handed = programs_v * box_rows * boxes * 128 if config.split else 0
    parts = 2 if config.paired or config.extra_rows else 1
    if config.one_byte:  # two warpgroups with all rows
        rows = box_rows * boxes if B <= ROWS else 2 * ROWS
        parts, handed = 2, blocks_b * programs_v * 2 * 128 * rows
    return Operands(
        lambda hidden, weight: (_boxes(hidden, box_rows), _boxes(weight, 128)),
        programs_v * parts,
        (blocks_b * programs_v,),
        {
            "WARPGROUPS": config.warpgroups,
            "PAIRED": config.paired,
            "EXTRA_ROWS": config.extra_rows,
            "BOXES": boxes,
            "BLOCK_V": config.block_v,
            "CONTIGUOUS": config.contiguous,
            "BLOCK_D": config.block_d,
            "STAGES": config.num_stages,
            "num_warps": 4,
            **({} if handed else {"sums_ptr": None}),
        },
        handed,
    )


def _boxes(matrix: Tensor, box_rows: int) -> TensorDescriptor:
    return _descriptor(matrix.data_ptr(), matrix.dtype, *matrix.shape, box_rows)


@lru_cache(maxsize=4096)  # constructing a descriptor takes longer than looking it up
def _descriptor(
    address: int, dtype: torch.dtype, rows: int, cols: int, box_rows: int
) -> TensorDescriptor:
    bits = dtype.itemsize * 8
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    base = Address(address, dtype)
    return TensorDescriptor(base, [rows, cols], [cols, 1], [box_rows, CHUNK * 16 // bits], layout)
