"""The launch of the screen for Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsbench.kernels.configs.screen import HopperScreenConfig
from fsbench.kernels.device.hopper_epilogue import ROWS
from fsbench.kernels.launch.launch_cache import Launch
from fsbench.kernels.launch.operands import Address
from fsbench.kernels.screened.hopper.kernel import hopper_screen_kernel
from fsbench.kernels.screened.hopper.loading import COLUMNS


def prepare(
    grid: tuple[int], B: int, config: HopperScreenConfig, shared: dict[str, Any], tokens: int
) -> tuple[Launch, Callable[[Tensor, Tensor], tuple[Any, Any]]]:
    """The launch, and (codes, copy) -> both as it loads them.

    shared: arguments of the portable screen that are also its own. tokens: of this rank, or all.
    """
    box = min(ROWS.value, max(16, 2 * triton.next_power_of_2(B)))
    fixed = {
        **shared,
        "V": tokens,
        "ROWS": config.block_b,
        "SPLIT": config.split,
        "STAGES": config.num_stages,
        "num_warps": config.num_warps,
    }
    launch = Launch(hopper_screen_kernel, grid, fixed)
    return launch, lambda codes, copy: (_boxes(codes, box), _boxes(copy, 128))


def _boxes(matrix: Tensor, rows: int) -> TensorDescriptor:
    return _descriptor(matrix.data_ptr(), *matrix.shape, rows)


@lru_cache(maxsize=4096)  # to check one takes longer than to find it
def _descriptor(address: int, rows: int, cols: int, box_rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    base = Address(address, torch.int8)
    return TensorDescriptor(base, [rows, cols], [cols, 1], [box_rows, COLUMNS.value], layout)
