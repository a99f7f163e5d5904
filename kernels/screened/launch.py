"""Host side of the screened sampler's kernels: scratch memory, two launches.

The codes of hidden, the records and the lists are scratch memory of a call. Counters, bounds and
keys are of a workspace that every call leaves as it found it, so nothing is cleared.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from fsbench.kernels.call.operands import (
    greedy,
    matrix_operand,
    per_row,
    processing,
    vocab_programs,
)
from fsbench.kernels.call.prepared import launch_kernel
from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Screened
from fsbench.kernels.call.workspace import workspace
from fsbench.kernels.configs.choice import tma_possible
from fsbench.kernels.configs.gpu import launching_on, multiprocessors
from fsbench.kernels.configs.screen import (
    HopperScreenConfig,
    ResolveConfig,
    ScreenConfig,
    portable_config,
)
from fsbench.kernels.device.mainloop import ROTATION
from fsbench.kernels.noise.group import group_size, tokens_of_block
from fsbench.kernels.screened import hopper
from fsbench.kernels.screened.copied import HeadCopy
from fsbench.kernels.screened.portable import screen_kernel
from fsbench.kernels.screened.resolve import resolve_kernel
from fsbench.kernels.screened.rounding import ROW_NUMBERS
from fsbench.kernels.screened.scratch import COUNTERS, Scratch, rounded_columns, rounding_numbers


def launch(
    request: Request,
    head: HeadCopy,
    configs: tuple[ScreenConfig | HopperScreenConfig, ResolveConfig],
    out: Screened,
) -> None:
    """Draw one token for each row by the screen.

    A request that the screen for Hopper cannot serve takes the portable one, which has the same
    tokens.
    """
    config, resolving = configs
    hidden, weight = request.hidden, request.weight
    device = hidden.device
    if isinstance(config, HopperScreenConfig) and not _fits_hopper(request, head):
        config = portable_config(len(hidden))
    shard = request.shard
    line = None if shard is None else shard.line
    tokens = request.vocab_size if shard is None else shard.num_tokens
    B, D = hidden.shape
    blocks_b = triton.cdiv(B, config.block_b)
    programs_v = vocab_programs(blocks_b, tokens, config.block_v, device, config.ctas_per_sm)
    rows = triton.cdiv(B, 16) * 16  # keeps the alignment that Triton compiles for
    with launching_on(device):
        work = workspace(2 * rows, device)  # at least COUNTERS + rows
    noise = "none" if greedy(request) else request.noise
    size = group_size(noise)
    block = tokens_of_block(size)
    # A slot of groups has more tokens, so there may be fewer of them, with more room each.
    slots = min(config.slots, (128 if size > 1 else config.block_v) // block)
    room = config.room * config.slots // slots
    integers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    scratch = Scratch(
        torch.empty(blocks_b * 2 * config.block_b, D, dtype=torch.int8, device=device),
        torch.empty(ROW_NUMBERS.value, B, dtype=torch.float32, device=device),
        work.arrivals,
        work.keys[rows:],
        work.arrivals[COUNTERS:],
        torch.empty(programs_v, B, slots, room, 2, **integers),
        torch.empty(2, B, config.row_room, **integers),
    )
    processed = processing(request)
    nvidia = device.type == "cuda" and torch.version.hip is None
    modern = nvidia and torch.cuda.get_device_capability(device) >= (9, 0)
    of_both: dict[str, Any] = {
        "hidden_ptr": hidden,
        "seed_ptr": request.seed,
        "offset_ptr": request.offset,
        "temperature": request.temperature,
        "counters_ptr": scratch.counters,
        "lower_ptr": scratch.lower,
        "listed_ptr": scratch.listed,
        "list_ptr": scratch.lists,
        "found_ptr": out.found,
        "B": B,
        "V": request.vocab_size,
        "D": D,
        "first_token": None if shard is None else shard.first_token,
        "NOISE": noise,
        **per_row(request),
        "LIST": config.row_room,
        "EARLY": resolving.early and modern,
    }
    of_screens: dict[str, Any] = {
        "codes_ptr": scratch.codes,
        "copy_ptr": head.codes,
        "scale_ptr": head.scale,
        "residual_ptr": head.residual,
        "norm_ptr": head.norm,
        "numbers_ptr": scratch.numbers,
        "records_ptr": scratch.records,
        **rounding_numbers(D),
        "ROOM": room,
        "ROUNDED_AT_ONCE": rounded_columns(D),
        "AHEAD": config.ahead,
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
    }
    of_logits: dict[str, Any] = {
        "soft_cap": request.soft_cap,
        "bias_ptr": processed.bias,
        "row_bias_ptr": processed.row_bias,
        "mask_ptr": processed.mask,
        "mask_words": processed.mask_words,
        "num_tokens": None if shard is None else tokens,
    }
    grid = (blocks_b * programs_v,)
    with launching_on(device):
        if isinstance(config, HopperScreenConfig):
            hopper.launch.screen(grid, B, head, config, scratch, of_both | of_screens, tokens)
        else:
            by_tma = tma_possible(head.codes)
            launch_kernel(
                screen_kernel,
                device,
                grid,
                codes=matrix_operand(scratch.codes, 2 * config.block_b, config.block_d, by_tma),
                copy=matrix_operand(head.codes, config.block_v, config.block_d, by_tma),
                DEPTH=config.depth,
                BLOCK_B=config.block_b,
                SLICE=slots * block,
                V_ON_M=config.v_on_m,
                USE_TMA=by_tma,
                FLATTEN=config.flatten,
                NVIDIA=nvidia,
                FENCED=modern,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                **of_both,
                **of_screens,
                **of_logits,
            )
        by_tma = tma_possible(hidden, weight)
        block_v = max(128, resolving.block_v) if size > 1 else resolving.block_v
        launch_kernel(
            resolve_kernel,
            device,
            (multiprocessors(device) * resolving.ctas_per_sm,),
            hidden=matrix_operand(hidden, resolving.block_b, resolving.block_d, by_tma),
            weight=matrix_operand(weight, block_v, resolving.block_d, by_tma),
            weight_ptr=weight,
            keys_ptr=work.keys,
            tokens_ptr=out.tokens,
            valid_ptr=out.valid,
            buffers_ptr=None if line is None else line.buffers,
            counts_ptr=None if line is None else line.counts,
            rank=None if shard is None or line is None else shard.rank,
            area=None if shard is None or line is None else shard.slots,
            RANKS=1 if shard is None else shard.ranks,
            WATCH=device.type == "cuda",
            POWER_B=triton.next_power_of_2(B),
            AT_ONCE=max(resolving.at_once, size),
            BLOCKS=max(8, triton.next_power_of_2(triton.cdiv(D, ROTATION.value))),
            STEP=resolving.step,
            EVEN=D % ROTATION.value == 0,
            BLOCK_B=resolving.block_b,
            BLOCK_V=block_v,
            BLOCK_D=resolving.block_d,
            USE_TMA=by_tma,
            SLICE=block_v,
            IN_BULK=modern and by_tma,
            num_warps=resolving.num_warps,
            num_stages=resolving.num_stages,
            **({"launch_pdl": True} if of_both["EARLY"] else {}),
            **of_both,
            **of_logits,
        )


def _fits_hopper(request: Request, head: HeadCopy) -> bool:
    """Whether the screen for Hopper can serve it: a plain request, on matrices that TMA loads."""
    plain = request.bias is None and request.mask is None and request.soft_cap is None
    return plain and tma_possible(head.codes)
