"""Host side of the screened sampler's kernels: scratch memory, two launches for up to four samples.

The codes of hidden, the records and the lists are scratch memory of a call. Counters, bounds and
keys are of a workspace that every call leaves as it found it, so nothing is cleared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from fsbench.kernels import _choice, _screen
from fsbench.kernels._arguments import Request
from fsbench.kernels._device import launching_on, multiprocessors
from fsbench.kernels._launch import (
    SAMPLES_AT_ONCE,
    greedy,
    matrix_operand,
    per_row,
    processing,
    vocab_programs,
)
from fsbench.kernels._mainloop import ROTATION
from fsbench.kernels._resolve_kernel import resolve_kernel
from fsbench.kernels._screen_kernel import ROW_NUMBERS, screen_kernel
from fsbench.kernels._screened_config import ResolveConfig, ScreenConfig
from fsbench.kernels._screened_head import ScreenedHead
from fsbench.kernels._workspace import workspace

if TYPE_CHECKING:
    from fsbench.kernels._screened_sample import Screened

COUNTERS = 16
"""Three are used; so many keep what follows aligned."""


def launch(
    request: Request,
    head: ScreenedHead,
    configs: tuple[ScreenConfig, ResolveConfig],
    out: Screened,
) -> None:
    """Draw by the screen, up to SAMPLES_AT_ONCE samples per pass over the copy."""
    config, resolving = configs
    hidden, weight, V = request.hidden, request.weight, request.vocab_size
    temperature, device, samples = request.temperature, hidden.device, request.num_samples
    B, D = hidden.shape
    blocks_b = triton.cdiv(B, config.block_b)
    programs_v = vocab_programs(blocks_b, V, config.block_v, device, config.ctas_per_sm)
    at_once = min(samples, SAMPLES_AT_ONCE)
    draws = triton.cdiv(B * at_once, 16) * 16
    work = workspace(max(2 * draws, COUNTERS + draws), device)
    keys, lower = work.keys, work.keys[draws:]
    counters, listed = work.arrivals, work.arrivals[COUNTERS:]

    def scratch(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    codes = scratch(blocks_b * 2 * config.block_b, D, dtype=torch.int8)
    numbers = scratch(ROW_NUMBERS.value, B, dtype=torch.float32)
    records = scratch(at_once, programs_v, B, config.slots, config.room, 2)
    lists = scratch(2, B * at_once, config.row_room)
    copy_by_tma = _choice.tma_possible(head.codes)
    by_tma = _choice.tma_possible(hidden) and _choice.tma_possible(weight)
    processed = processing(request)
    options: dict[str, Any] = {
        "NOISE": "none" if greedy(request) else "token",
        **per_row(request),
        "LIST": config.row_room,
        "EARLY": resolving.early and device.type == "cuda",
        "NVIDIA": device.type == "cuda" and torch.version.hip is None,
    }
    with launching_on(device):
        for first_sample in range(0, samples, at_once):
            options["N"] = min(at_once, samples - first_sample)
            screen_kernel[(blocks_b * programs_v,)](
                hidden,
                codes,
                matrix_operand(codes, 2 * config.block_b, config.block_d, copy_by_tma),
                head.codes,
                matrix_operand(head.codes, config.block_v, config.block_d, copy_by_tma),
                head.scale,
                head.residual,
                head.norm,
                numbers,
                request.seed,
                request.offset,
                temperature,
                request.soft_cap,
                processed.bias,
                processed.row_bias,
                processed.mask,
                counters,
                lower,
                listed,
                records,
                lists,
                out.found,
                B,
                V,
                D,
                _screen.accumulation_error(D),
                1 + (D + 4) * 2.0**-24,
                D**0.5,
                processed.mask_words,
                samples,
                first_sample,
                ROOM=config.room,
                DEPTH=config.depth,
                CHUNK=min(2048, triton.next_power_of_2(D)),
                BLOCK_B=config.block_b,
                BLOCK_V=config.block_v,
                BLOCK_D=config.block_d,
                SLICE=config.slice,
                V_ON_M=config.v_on_m,
                USE_TMA=copy_by_tma,
                FLATTEN=config.flatten,
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                **options,
            )
            resolve_kernel[(multiprocessors(device) * resolving.ctas_per_sm,)](
                matrix_operand(hidden, resolving.block_b, resolving.block_d, by_tma),
                matrix_operand(weight, resolving.block_v, resolving.block_d, by_tma),
                hidden,
                weight,
                request.seed,
                request.offset,
                temperature,
                request.soft_cap,
                processed.bias,
                processed.row_bias,
                processed.mask,
                counters,
                lower,
                listed,
                lists,
                keys,
                out.found,
                out.tokens,
                out.valid,
                B,
                V,
                D,
                processed.mask_words,
                samples,
                first_sample,
                DRAWS=triton.next_power_of_2(B * options["N"]),
                AT_ONCE=resolving.at_once,
                BLOCKS=max(8, triton.next_power_of_2(triton.cdiv(D, ROTATION.value))),
                STEP=resolving.step,
                BLOCK_B=resolving.block_b,
                BLOCK_V=resolving.block_v,
                BLOCK_D=resolving.block_d,
                USE_TMA=by_tma,
                SLICE=resolving.block_v,
                num_warps=resolving.num_warps,
                num_stages=resolving.num_stages,
                **({"launch_pdl": True} if options["EARLY"] else {}),
                **options,
            )
