"""What a launch of the Hopper kernel needs: the kernel, and its operands."""

from __future__ import annotations

import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsbench.kernels.call.operands import Operands, vocab_programs
from fsbench.kernels.configs.hopper import CHUNK, HopperConfig
from fsbench.kernels.fused.hopper.kernel import hopper_kernel

__all__ = ["hopper_kernel", "operands"]


def operands(hidden: Tensor, weight: Tensor, V: int, config: HopperConfig) -> Operands:
    """How the Hopper kernel loads hidden [B, D] and the first V rows of weight."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    B = hidden.shape[0]
    blocks_b = triton.cdiv(B, config.block_b)
    programs_v = vocab_programs(blocks_b, V, config.block_v, hidden.device)
    return Operands(
        TensorDescriptor.from_tensor(hidden, [config.box_rows(B), CHUNK], layout),
        TensorDescriptor.from_tensor(weight, [128, CHUNK], layout),
        programs_v,
        (blocks_b * programs_v,),
        {
            "WARPGROUPS": config.warpgroups,
            "BLOCK_V": config.block_v,
            "CONTIGUOUS": config.contiguous,
            "BLOCK_D": config.block_d,
            "STAGES": config.num_stages,
            "num_warps": 4,
        },
    )
