"""The launch of the screen for Hopper."""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsbench.kernels.call.prepared import launch_kernel
from fsbench.kernels.configs.screen import HopperScreenConfig
from fsbench.kernels.device.hopper_epilogue import ROWS
from fsbench.kernels.screened.copied import HeadCopy
from fsbench.kernels.screened.hopper.kernel import COLUMNS, hopper_screen_kernel
from fsbench.kernels.screened.scratch import Scratch


def screen(
    grid: tuple[int],
    B: int,
    head: HeadCopy,
    config: HopperScreenConfig,
    scratch: Scratch,
    shared: dict[str, Any],
    tokens: int,
) -> None:
    """Launch it with the arguments that it shares with the portable screen, and its own.

    tokens: of this rank, or all.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    box = min(ROWS.value, max(16, 2 * triton.next_power_of_2(B)))
    launch_kernel(
        hopper_screen_kernel,
        scratch.codes.device,
        grid,
        codes=TensorDescriptor.from_tensor(scratch.codes, [box, COLUMNS.value], layout),
        copy=TensorDescriptor.from_tensor(head.codes, [128, COLUMNS.value], layout),
        WARPGROUPS=config.warpgroups,
        STAGES=config.num_stages,
        num_warps=4,
        **(shared | {"V": tokens}),
    )
