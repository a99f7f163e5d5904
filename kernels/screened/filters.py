"""Launch filters from the screen: four launches, then those of truncated_sample."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from fsbench.kernels import truncated
from fsbench.kernels.configs.choice import tma_possible
from fsbench.kernels.configs.gpu import launching_on, multiprocessors
from fsbench.kernels.configs.screen_choice import filter_configs
from fsbench.kernels.device.mainloop import ROTATION
from fsbench.kernels.device.stored_logits import allocate
from fsbench.kernels.launch.launch_cache import launch_kernel
from fsbench.kernels.launch.operands import matrix_operand, per_row, processing, vocab_programs
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import TruncatedSample
from fsbench.kernels.launch.workspace import workspace
from fsbench.kernels.screened.bounds import accumulation_error
from fsbench.kernels.screened.filter_kernels import (
    LEADERS,
    LISTERS,
    filter_candidates_kernel,
    filter_leaders_kernel,
    filter_resolve_kernel,
    filter_screen_kernel,
)
from fsbench.kernels.screened.int8_copy import HeadCopy
from fsbench.kernels.screened.rounding import (
    COUNTERS,
    ROW_NUMBERS,
    rounded_columns,
    rounding_numbers,
)

TILE = 4096
"""Tokens of a program that puts candidates on the list: 16 for each thread."""


def launch(request: Request, head: HeadCopy, filters: Filters, out: TruncatedSample) -> None:
    """Draw one token of each row among the tokens that the filters keep; fill out.found, too."""
    hidden, weight, V = request.hidden, request.weight, request.vocab_size
    device, (B, D) = hidden.device, hidden.shape
    config, resolving = filter_configs(B, D, device)
    blocks_b = triton.cdiv(B, config.block_b)
    programs_v = vocab_programs(blocks_b, V, config.block_v, device, config.ctas_per_sm)
    stored = allocate(B, V, device, largest=True)
    stride = stored.logits.shape[1]
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    codes = torch.empty(blocks_b * 2 * config.block_b, D, dtype=torch.int8, device=device)
    listed = torch.empty(B, **integers)
    lists = torch.empty(B, config.row_room, **integers)
    processed = processing(request)
    nvidia = device.type == "cuda" and torch.version.hip is None
    capability = torch.cuda.get_device_capability(device) if nvidia else (0, 0)
    modern = capability >= (9, 0)
    common: dict[str, Any] = {
        "hidden_ptr": hidden,
        "soft_cap": request.soft_cap,
        "bias_ptr": processed.bias,
        "row_bias_ptr": processed.row_bias,
        "logits_ptr": stored.logits,
        "largest_ptr": stored.largest,
        "V": V,
        "D": D,
        "stride": stride,
        "UNIT": math.gcd(D, 16),
    }
    mask_args: dict[str, Any] = {"mask_ptr": processed.mask, "mask_words": processed.mask_words}
    k_args: dict[str, Any] = {
        "temperature": request.temperature,
        "top_k": filters.top_k,
        "leaders_ptr": torch.empty(B, LEADERS.value, dtype=torch.float32, device=device),
        "TEMPERATURE_PER_ROW": per_row(request)["TEMPERATURE_PER_ROW"],
        "TOP_K_PER_ROW": isinstance(filters.top_k, torch.Tensor),
    }
    copy_by_tma = tma_possible(head.codes)
    by_tma = tma_possible(hidden, weight)
    block_v = max(128, resolving.block_v)
    list_args: dict[str, Any] = {
        "listed_ptr": listed,
        "list_ptr": lists,
        "LIST": config.row_room,
    }
    even = D % ROTATION.value == 0
    by_warps = resolving.by_warps and capability == (9, 0) and by_tma and even
    weight_args: dict[str, Any] = {"weight_ptr": weight, "IN_BULK": modern and by_tma}
    exact_args: dict[str, Any] = {
        "AT_ONCE": 8 * resolving.num_warps if by_warps else resolving.at_once,
        "BLOCKS": max(16, triton.next_power_of_2(triton.cdiv(D, ROTATION.value))),
        "STEP": resolving.step,
        "EVEN": even,
        "BY_WARPS": by_warps,
    }
    with launching_on(device):
        counters = workspace(COUNTERS, device).arrivals
        launch_kernel(
            filter_screen_kernel,
            device,
            (blocks_b * programs_v,),
            codes_ptr=codes,
            codes=matrix_operand(codes, 2 * config.block_b, config.block_d, copy_by_tma),
            copy_ptr=head.codes,
            copy=matrix_operand(head.codes, config.block_v, config.block_d, copy_by_tma),
            scale_ptr=head.scale,
            residual_ptr=head.residual,
            norm_ptr=head.norm,
            numbers_ptr=torch.empty(ROW_NUMBERS.value, B, dtype=torch.float32, device=device),
            B=B,
            **common,
            **mask_args,
            counters_ptr=counters,
            found_ptr=out.found,
            **rounding_numbers(D),
            ROUNDED_AT_ONCE=rounded_columns(D, config.num_warps),
            AHEAD=config.ahead,
            BLOCK_B=config.block_b,
            BLOCK_V=config.block_v,
            BLOCK_D=config.block_d,
            V_ON_M=config.v_on_m,
            USE_TMA=copy_by_tma,
            FLATTEN=config.flatten,
            NVIDIA=nvidia,
            FENCED=modern,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        launch_kernel(
            filter_leaders_kernel,
            device,
            (B, LISTERS.value),
            counters_ptr=counters,
            tokens_ptr=out.tokens,
            valid_ptr=out.valid,
            listed_ptr=listed,
            LIST=config.row_room,
            SHARE=share_of_groups(stride),
            gamma=accumulation_error(D),
            **common,
            **k_args,
            **weight_args,
            num_warps=4,
        )
        launch_kernel(
            filter_candidates_kernel,
            device,
            (B, triton.cdiv(stride, TILE)),
            logits_ptr=stored.logits,
            largest_ptr=stored.largest,
            leaders=LEADERS.value,
            stride=stride,
            **k_args,
            **list_args,
            TILE=TILE,
            num_warps=8,
        )
        launch_kernel(
            filter_resolve_kernel,
            device,
            (multiprocessors(device) * resolving.ctas_per_sm,),
            hidden=matrix_operand(hidden, resolving.block_b, resolving.block_d, by_tma),
            weight=matrix_operand(weight, block_v, resolving.block_d, by_tma),
            B=B,
            **common,
            **mask_args,
            **list_args,
            **weight_args,
            **exact_args,
            found_ptr=out.found,
            POWER_B=triton.next_power_of_2(B),
            BLOCK_B=resolving.block_b,
            BLOCK_V=block_v,
            BLOCK_D=resolving.block_d,
            USE_TMA=by_tma,
            num_warps=resolving.num_warps,
            num_stages=resolving.num_stages,
        )
    truncated.launch.finish(request, stored, filters, None, out)


def share_of_groups(stride: int) -> int:
    """Return the groups of each program that looks for leaders: a power of two."""
    return max(LEADERS.value, triton.next_power_of_2(stride // 32)) // LISTERS.value
