"""The launch of the screen for Hopper."""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Screened
from fsbench.kernels.configs.screen import HopperScreenConfig
from fsbench.kernels.device.hopper_epilogue import ROWS
from fsbench.kernels.screened.head import ScreenedHead
from fsbench.kernels.screened.hopper.kernel import COLUMNS, hopper_screen_kernel
from fsbench.kernels.screened.scratch import Scratch, rounded_columns, rounding_numbers


def screen(
    grid: tuple[int],
    request: Request,
    head: ScreenedHead,
    config: HopperScreenConfig,
    scratch: Scratch,
    out: Screened,
    options: dict[str, Any],
) -> None:
    """The screen for Hopper."""
    B, D = request.hidden.shape
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    box = min(ROWS.value, max(16, 2 * triton.next_power_of_2(B)))
    hopper_screen_kernel[grid](
        hidden_ptr=request.hidden,
        codes_ptr=scratch.codes,
        codes=TensorDescriptor.from_tensor(scratch.codes, [box, COLUMNS.value], layout),
        copy=TensorDescriptor.from_tensor(head.codes, [128, COLUMNS.value], layout),
        copy_ptr=head.codes,
        scale_ptr=head.scale,
        residual_ptr=head.residual,
        norm_ptr=head.norm,
        numbers_ptr=scratch.numbers,
        seed_ptr=request.seed,
        offset_ptr=request.offset,
        temperature=request.temperature,
        counters_ptr=scratch.counters,
        lower_ptr=scratch.lower,
        listed_ptr=scratch.listed,
        records_ptr=scratch.records,
        list_ptr=scratch.lists,
        found_ptr=out.found,
        B=B,
        V=request.vocab_size,
        D=D,
        **rounding_numbers(D),
        ROOM=config.room,
        ROUNDED_AT_ONCE=rounded_columns(D),
        AHEAD=config.ahead,
        WARPGROUPS=config.warpgroups,
        BLOCK_V=config.block_v,
        BLOCK_D=config.block_d,
        STAGES=config.num_stages,
        num_warps=4,
        **options,
    )
