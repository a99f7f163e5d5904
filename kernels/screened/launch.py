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
from fsbench.kernels.configs.screen import HopperScreenConfig, ResolveConfig, ScreenConfig
from fsbench.kernels.configs.screen_choice import default_configs, portable_config
from fsbench.kernels.device.mainloop import ROTATION
from fsbench.kernels.launch.launch_cache import (
    Launch,
    LaunchSequence,
    Scratch,
    cached,
    launch_key,
)
from fsbench.kernels.launch.operands import (
    Processing,
    matrix_operand,
    per_row,
    processing,
    vocab_programs,
)
from fsbench.kernels.launch.request import Request, greedy
from fsbench.kernels.launch.result import Screened, TruncatedSample
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


def launch(request: Request, head: HeadCopy, configs: ScreenConfigs | None, out: Screened) -> None:
    """Draw one token for each row by the screen.

    A request that the Hopper screen cannot serve takes the portable screen; tokens are the same.

    Args:
        configs: tile shapes of both launches; None for the defaults.
    """
    assert out.found is not None
    tensors = (out.tokens, out.valid, out.found, *head.copy)
    key = launch_key(request, tensors, "screened", configs)
    processed = processing(request)
    arguments = request, head, configs, processed.mask_words
    cached(key, ScreenedLaunch, *arguments)(request, head, processed, out)


class ScreenedLaunch:
    """The two launches of a call from a screened head, for all calls of one key.

    Args:
        configs: as in launch.
        mask_words: of a row of the mask.
    """

    def __init__(
        self, request: Request, head: HeadCopy, configs: ScreenConfigs | None, mask_words: int
    ):
        hidden, shard = request.hidden, request.shard
        device, (B, D) = hidden.device, hidden.shape
        config, resolving = configs or default_configs(B, D, device)
        copy_by_tma, by_tma = tma_possible(head.codes), tma_possible(hidden, request.weight)
        plain = request.bias is None and request.mask is None and request.soft_cap is None
        if isinstance(config, HopperScreenConfig) and not (copy_by_tma and plain):
            config = portable_config(B, D, device)
        tokens = request.vocab_size if shard is None else shard.num_tokens
        blocks_b = triton.cdiv(B, config.block_b)
        programs_v = vocab_programs(blocks_b, tokens, config.block_v, device, config.ctas_per_sm)
        ranked = None if shard is None or shard.line is None else shard
        common: dict[str, Any] = {
            "rank": None if ranked is None else ranked.rank,
            "area": None if ranked is None else ranked.slots,
            "RANKS": 1 if shard is None else shard.ranks,
            "B": B,
            "D": D,
            "first_token": None if shard is None else shard.first_token,
            "NOISE": "none" if greedy(request) else request.noise,
            **per_row(request),
            "LIST": config.row_room,
        }
        logit_args: dict[str, Any] = {
            "V": request.vocab_size,
            "num_tokens": None if shard is None else tokens,
            "mask_words": mask_words,
        }
        screen_args = {**common, "ROOM": config.room}
        grid = (blocks_b * programs_v,)
        self.portable = not isinstance(config, HopperScreenConfig)
        if isinstance(config, HopperScreenConfig):
            screen_args |= tile_constants(config, D)
            screen, load_screen = hopper.kernel.prepare(grid, B, config, screen_args, tokens)
        else:
            screen_args |= portable_constants(config, D, device, copy_by_tma)
            screen_args |= {"DEPTH": config.depth, "SLICE": config.slice, "UNIT": math.gcd(D, 16)}
            screen = Launch(screen_kernel, grid, screen_args | logit_args)
            load_screen = boxes(2 * config.block_b, config.block_v, config.block_d, copy_by_tma)
        resolve = _resolve_launch(request, resolving, by_tma, common | logit_args)
        load_resolve = boxes(resolving.block_b, resolving.block_v, resolving.block_d, by_tma)
        codes = (blocks_b * 2 * config.block_b, D)
        self.operands = HeadOperands(codes, load_screen, load_resolve)
        self.rows = triton.cdiv(B, 16) * 16  # keeps the alignment that Triton compiles for
        scratch: Scratch = {
            "numbers_ptr": ((ROW_NUMBERS.value, B), torch.float32),
            "records_ptr": ((programs_v, B, config.slots, config.room, 2), torch.int32),
            "list_ptr": ((2, B, config.row_room), torch.int32),
        }
        self.run = LaunchSequence([screen, resolve], scratch, device)

    def __call__(
        self, request: Request, head: HeadCopy, processed: Processing, out: Screened
    ) -> None:
        """Launch for a call of the same key. processed: that of its request."""
        shard, device = request.shard, request.hidden.device
        line = None if shard is None else shard.line
        with launching_on(device):
            work = workspace(2 * self.rows, device)  # at least COUNTERS + rows
            arguments = self.operands.arguments(request, head, processed, out)
            if not self.portable:
                arguments["copy_ptr"] = None
            self.run(
                {
                    **arguments,
                    "seed_ptr": request.seed,
                    "offset_ptr": request.offset,
                    "buffers_ptr": None if line is None else line.buffers,
                    "counts_ptr": None if line is None else line.counts,
                    "counters_ptr": work.arrivals,
                    "listed_ptr": work.arrivals[COUNTERS:],
                    "keys_ptr": work.keys,
                    "lower_ptr": work.keys[self.rows :],
                }
            )


def _resolve_launch(
    request: Request, config: ResolveConfig, by_tma: bool, common: dict[str, Any]
) -> Launch:
    """Return the second launch. common: arguments that the screen has, too."""
    weight, device, (B, D) = request.weight, request.hidden.device, request.hidden.shape
    led_from = config.led_from
    if led_from is not None:  # tokens, not MiB
        led_from = (led_from << 20) // (D * weight.element_size())
    fixed: dict[str, Any] = {
        "WATCH": device.type == "cuda",
        **exact_constants(config, B, D, device, by_tma),
        "BLOCKS": max(8, triton.next_power_of_2(triton.cdiv(D, ROTATION.value))),
        "BLOCK_V": config.block_v,
        "SLICE": config.block_v,
        "gamma": accumulation_error(D),
        "led_from": led_from,
    }
    per_multiprocessor = 2 if fixed["BY_WARPS"] else config.ctas_per_sm
    programs = multiprocessors(device) * per_multiprocessor
    return Launch(resolve_kernel, (programs,), fixed | common)


class HeadOperands(NamedTuple):
    """The matrices that kernels of a screened head load, in a call or with filters.

    codes: shape of the codes of hidden. load_screen, load_resolve: make kernel operands of two
    matrices, (codes, copy) and (hidden, weight).
    """

    codes: tuple[int, int]
    load_screen: Callable[[Tensor, Tensor], tuple[Any, Any]]
    load_resolve: Callable[[Tensor, Tensor], tuple[Any, Any]]

    def arguments(
        self,
        request: Request,
        head: HeadCopy,
        processed: Processing,
        out: Screened | TruncatedSample,
    ) -> dict[str, Any]:
        """Return the arguments of one call by the kernels' names.

        processed: that of the request.
        """
        codes = torch.empty(*self.codes, dtype=torch.int8, device=request.hidden.device)
        code_boxes, copy_boxes = self.load_screen(codes, head.codes)
        hidden, weight = self.load_resolve(request.hidden, request.weight)
        return {
            "hidden": hidden,
            "weight": weight,
            "hidden_ptr": request.hidden,
            "weight_ptr": request.weight,
            "codes": code_boxes,
            "copy": copy_boxes,
            "codes_ptr": codes,
            "copy_ptr": head.codes,
            "scale_ptr": head.scale,
            "residual_ptr": head.residual,
            "norm_ptr": head.norm,
            "temperature": request.temperature,
            "soft_cap": request.soft_cap,
            "bias_ptr": processed.bias,
            "row_bias_ptr": processed.row_bias,
            "mask_ptr": processed.mask,
            "tokens_ptr": out.tokens,
            "valid_ptr": out.valid,
            "found_ptr": out.found,
        }


def tile_constants(config: ScreenConfig | HopperScreenConfig, D: int) -> dict[str, Any]:
    """Return the constants that all screens have: of the rounding of hidden, and of a tile."""
    return {
        **rounding_numbers(D),
        "ROUNDED_AT_ONCE": rounded_columns(D, config.num_warps),
        "BLOCK_V": config.block_v,
        "BLOCK_D": config.block_d,
    }


def portable_constants(
    config: ScreenConfig, D: int, device: torch.device, by_tma: bool
) -> dict[str, Any]:
    """Return the constants of a portable screen, of a call or of filters.

    by_tma: whether TMA can load the codes and the copy.
    """
    on_gpu = device.type == "cuda"
    return {
        **tile_constants(config, D),
        "AHEAD": config.ahead,
        "BLOCK_B": config.block_b,
        "V_ON_M": config.v_on_m,
        "USE_TMA": by_tma,
        "FLATTEN": config.flatten,
        "NVIDIA": on_gpu and torch.version.hip is None,
        "FENCED": on_gpu and has_tma(device),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


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
