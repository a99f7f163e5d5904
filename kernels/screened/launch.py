"""Launch the screened sampler: scratch memory and two launches.

The codes of hidden, the records and the lists are scratch memory of a call. Counters, bounds and
keys are in a workspace that every call resets at its end, so nothing is cleared before a call. With
several ranks the bounds are in memory that all ranks write to (screened.lower_bounds).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fsbench.kernels.checks.values import ScreenConfigs
from fsbench.kernels.configs.choice import has_tma, tma_possible
from fsbench.kernels.configs.gpu import is_hopper, launching_on, multiprocessors
from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig
from fsbench.kernels.configs.screen_choice import portable_config
from fsbench.kernels.device.mainloop import ROTATION
from fsbench.kernels.launch.launch_cache import Launch, cached, launch_key
from fsbench.kernels.launch.operands import (
    matrix_operand,
    per_row,
    processing,
    vocab_programs,
)
from fsbench.kernels.launch.request import Request, greedy
from fsbench.kernels.launch.result import Screened
from fsbench.kernels.launch.workspace import workspace
from fsbench.kernels.screened import hopper
from fsbench.kernels.screened.bounds import accumulation_error
from fsbench.kernels.screened.int8_copy import HeadCopy
from fsbench.kernels.screened.portable import screen_kernel
from fsbench.kernels.screened.resolve import resolve_kernel
from fsbench.kernels.screened.rounding import (
    COUNTERS,
    ROW_NUMBERS,
    rounded_columns,
    rounding_numbers,
)


class _Prepared(NamedTuple):
    """Launches and sizes that calls with one launch key share.

    screen, resolve: the launches. load_screen, load_resolve: make kernel operands of two matrices,
    (codes, copy) and (hidden, weight).
    codes, numbers, records, lists: shapes of the scratch memory. rows: B rounded up to 16.
    """

    screen: Launch
    resolve: Launch
    load_screen: Callable[[Tensor, Tensor], tuple[Any, Any]]
    load_resolve: Callable[[Tensor, Tensor], tuple[Any, Any]]
    codes: tuple[int, ...]
    numbers: tuple[int, ...]
    records: tuple[int, ...]
    lists: tuple[int, ...]
    rows: int


def launch(request: Request, head: HeadCopy, configs: ScreenConfigs, out: Screened) -> None:
    """Draw one token for each row by the screen.

    A request that the Hopper screen cannot serve takes the portable screen; tokens are the same.
    """
    hidden, weight, shard = request.hidden, request.weight, request.shard
    by_tma = tma_possible(head.codes), tma_possible(hidden, weight)
    assert out.found is not None
    tensors = (out.tokens, out.valid, out.found, *head.copy)
    key = launch_key(request, tensors, "screened", configs, by_tma)
    processed = processing(request)
    logit_args: dict[str, Any] = {
        "soft_cap": request.soft_cap,
        "bias_ptr": processed.bias,
        "row_bias_ptr": processed.row_bias,
        "mask_ptr": processed.mask,
    }
    line = None if shard is None else shard.line
    device = hidden.device
    with launching_on(device):
        prepared = cached(key, _prepare, request, head, configs, by_tma, processed.mask_words)
        work = workspace(2 * prepared.rows, device)  # at least COUNTERS + rows
        codes = torch.empty(prepared.codes, dtype=torch.int8, device=device)
        boxes, copy = prepared.load_screen(codes, head.codes)
        common: dict[str, Any] = {
            "buffers_ptr": None if line is None else line.buffers,
            "counts_ptr": None if line is None else line.counts,
            "hidden_ptr": hidden,
            "counters_ptr": work.arrivals,
            "lower_ptr": work.keys[prepared.rows :],
            "listed_ptr": work.arrivals[COUNTERS:],
            "list_ptr": torch.empty(prepared.lists, dtype=torch.int32, device=device),
            "found_ptr": out.found,
            "seed_ptr": request.seed,
            "offset_ptr": request.offset,
            "temperature": request.temperature,
        }
        portable_args = {"copy_ptr": head.codes, **logit_args}
        prepared.screen(
            {
                "codes_ptr": codes,
                "codes": boxes,
                "copy": copy,
                "scale_ptr": head.scale,
                "residual_ptr": head.residual,
                "norm_ptr": head.norm,
                "numbers_ptr": torch.empty(prepared.numbers, dtype=torch.float32, device=device),
                "records_ptr": torch.empty(prepared.records, dtype=torch.int32, device=device),
                **common,
                **(portable_args if prepared.screen.kernel is screen_kernel else {}),
            }
        )
        loaded_hidden, loaded_weight = prepared.load_resolve(hidden, weight)
        prepared.resolve(
            {
                "hidden": loaded_hidden,
                "weight": loaded_weight,
                "weight_ptr": weight,
                "keys_ptr": work.keys,
                "tokens_ptr": out.tokens,
                "valid_ptr": out.valid,
                **common,
                **logit_args,
            }
        )


def _prepare(
    request: Request,
    head: HeadCopy,
    configs: ScreenConfigs,
    by_tma: tuple[bool, bool],
    mask_words: int,
) -> _Prepared:
    """Prepare what calls with this launch key share.

    by_tma: whether TMA can load the codes and the copy, and hidden and the weight.
    """
    config, resolving = configs
    hidden, shard = request.hidden, request.shard
    device, (B, D) = hidden.device, hidden.shape
    plain = request.bias is None and request.mask is None and request.soft_cap is None
    if isinstance(config, HopperScreenConfig) and not (by_tma[0] and plain):
        config = portable_config(B, D, device)
    noise = "none" if greedy(request) else request.noise
    tokens = request.vocab_size if shard is None else shard.num_tokens
    blocks_b = triton.cdiv(B, config.block_b)
    programs_v = vocab_programs(blocks_b, tokens, config.block_v, device, config.ctas_per_sm)
    on_gpu = device.type == "cuda"
    ranked = None if shard is None or shard.line is None else shard
    common: dict[str, Any] = {
        "rank": None if ranked is None else ranked.rank,
        "area": None if ranked is None else ranked.slots,
        "RANKS": 1 if shard is None else shard.ranks,
        "B": B,
        "D": D,
        "first_token": None if shard is None else shard.first_token,
        "NOISE": noise,
        **per_row(request),
        "LIST": config.row_room,
    }
    logit_args: dict[str, Any] = {
        "V": request.vocab_size,
        "num_tokens": None if shard is None else tokens,
        "mask_words": mask_words,
    }
    screen_args: dict[str, Any] = {
        **rounding_numbers(D),
        "ROOM": config.room,
        "ROUNDED_AT_ONCE": rounded_columns(D, config.num_warps),
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
    }
    grid = (blocks_b * programs_v,)
    if isinstance(config, HopperScreenConfig):
        screen, load_screen = hopper.kernel.prepare(grid, B, config, common | screen_args, tokens)
    else:
        load_screen = boxes(2 * config.block_b, config.block_v, config.block_d, by_tma[0])
        fixed: dict[str, Any] = {
            "AHEAD": config.ahead,
            "DEPTH": config.depth,
            "BLOCK_B": config.block_b,
            "SLICE": config.slice,
            "V_ON_M": config.v_on_m,
            "USE_TMA": by_tma[0],
            "FLATTEN": config.flatten,
            "UNIT": math.gcd(D, 16),
            "NVIDIA": on_gpu and torch.version.hip is None,
            "FENCED": on_gpu and has_tma(device),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
        screen = Launch(screen_kernel, grid, fixed | common | screen_args | logit_args)
    led_from = resolving.led_from
    if led_from is not None:  # tokens, not MiB
        led_from = (led_from << 20) // (D * request.weight.element_size())
    resolve_args: dict[str, Any] = {
        "WATCH": on_gpu,
        **exact_constants(resolving, B, D, device, by_tma[1]),
        "BLOCKS": max(8, triton.next_power_of_2(triton.cdiv(D, ROTATION.value))),
        "BLOCK_V": resolving.block_v,
        "SLICE": resolving.block_v,
        "gamma": accumulation_error(D),
        "led_from": led_from,
    }
    per_multiprocessor = 2 if resolve_args["BY_WARPS"] else resolving.ctas_per_sm
    programs = multiprocessors(device) * per_multiprocessor
    return _Prepared(
        screen=screen,
        resolve=Launch(resolve_kernel, (programs,), resolve_args | common | logit_args),
        load_screen=load_screen,
        load_resolve=boxes(resolving.block_b, resolving.block_v, resolving.block_d, by_tma[1]),
        codes=(blocks_b * 2 * config.block_b, D),
        numbers=(ROW_NUMBERS.value, B),
        records=(programs_v, B, config.slots, config.room, 2),
        lists=(2, B, config.row_room),
        rows=triton.cdiv(B, 16) * 16,  # keeps the alignment that Triton compiles for
    )


def exact_constants(
    config: ResolveConfig, B: int, D: int, device: torch.device, by_tma: bool
) -> dict[str, Any]:
    """Return the constants of a kernel that computes exact logits, of a call or of filters.

    by_tma: whether TMA can load hidden and the weight.
    """
    even = D % ROTATION.value == 0
    by_warps = config.by_warps and is_hopper(device) and by_tma and even
    return {
        "POWER_B": triton.next_power_of_2(B),
        "AT_ONCE": 8 * config.num_warps if by_warps else config.at_once,
        "STEP": config.step,
        "UNIT": math.gcd(D, 16),
        "EVEN": even,
        "BLOCK_B": config.block_b,
        "BLOCK_D": config.block_d,
        "USE_TMA": by_tma,
        "IN_BULK": by_tma and device.type == "cuda",
        "BY_WARPS": by_warps,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def boxes(
    first_rows: int, second_rows: int, cols: int, by_tma: bool
) -> Callable[[Tensor, Tensor], tuple[Any, Any]]:
    """Return a function that makes kernel operands of two matrices, with boxes of this size."""
    return lambda first, second: (
        matrix_operand(first, first_rows, cols, by_tma),
        matrix_operand(second, second_rows, cols, by_tma),
    )
