"""Launch filters from the screen: four launches, then those of truncated_sample."""

from __future__ import annotations

from typing import Any

import torch
import triton

from fsbench.kernels.configs.choice import tma_possible
from fsbench.kernels.configs.gpu import launching_on, multiprocessors
from fsbench.kernels.configs.screen_choice import filter_configs
from fsbench.kernels.device.mainloop import ROTATION
from fsbench.kernels.device.stored_logits import allocate
from fsbench.kernels.launch.launch_cache import Launch, LaunchSequence, Scratch, cached
from fsbench.kernels.launch.operands import Processing, per_row, processing, vocab_programs
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
from fsbench.kernels.screened.launch import (
    HeadOperands,
    boxes,
    exact_constants,
    portable_constants,
)
from fsbench.kernels.screened.rounding import COUNTERS, ROW_NUMBERS
from fsbench.kernels.truncated.launch import Call, FilterLaunch

TILE = 4096
"""Tokens of a program that puts candidates on the list: 16 for each thread."""


def launch(request: Request, head: HeadCopy, filters: Filters, out: TruncatedSample) -> None:
    """Draw one token of each row among the tokens that the filters keep; fill out.found, too."""
    hidden = request.hidden
    stored = allocate(hidden.shape[0], request.vocab_size, hidden.device, largest=True)
    call = Call(request, stored, filters, None, out)
    processed = processing(request)

    def prepare() -> tuple[ScreenLaunch, FilterLaunch]:
        return ScreenLaunch(call, head, processed.mask_words), FilterLaunch(call)

    screen_launch, filter_launch = cached(call.key(head.copy, "screened"), prepare)
    screen_launch(call, head, processed)
    filter_launch(call)


class ScreenLaunch:
    """The launches that store exact logits of candidates, for all calls of one key."""

    def __init__(self, call: Call, head: HeadCopy, mask_words: int):
        request, stored, filters = call.request, call.stored, call.filters
        hidden, weight, V = request.hidden, request.weight, request.vocab_size
        device, (B, D) = hidden.device, hidden.shape
        stride = stored.logits.shape[1]
        config, resolving = filter_configs(B, D, device)
        blocks_b = triton.cdiv(B, config.block_b)
        programs_v = vocab_programs(blocks_b, V, config.block_v, device, config.ctas_per_sm)
        copy_by_tma, by_tma = tma_possible(head.codes), tma_possible(hidden, weight)
        block_v = max(128, resolving.block_v)
        screen = portable_constants(config, D, device, copy_by_tma)
        exact = exact_constants(resolving, B, D, device, by_tma)
        common: dict[str, Any] = {
            "B": B,
            "V": V,
            "D": D,
            "stride": stride,
            "mask_words": mask_words,
            "LIST": config.row_room,
            "UNIT": exact["UNIT"],
            "IN_BULK": exact["IN_BULK"],
            "TEMPERATURE_PER_ROW": per_row(request)["TEMPERATURE_PER_ROW"],
            "TOP_K_PER_ROW": isinstance(filters.top_k, torch.Tensor),
        }
        leaders = {"SHARE": share_of_groups(stride), "gamma": accumulation_error(D), "num_warps": 4}
        candidates = {"leaders": LEADERS.value, "TILE": TILE, "num_warps": 8}
        resolve = {
            **exact,
            "BLOCKS": max(16, triton.next_power_of_2(triton.cdiv(D, ROTATION.value))),
            "BLOCK_V": block_v,
        }
        programs = multiprocessors(device) * resolving.ctas_per_sm
        launches = [
            _launch(filter_screen_kernel, (blocks_b * programs_v,), common, screen),
            _launch(filter_leaders_kernel, (B, LISTERS.value), common, leaders),
            _launch(filter_candidates_kernel, (B, triton.cdiv(stride, TILE)), common, candidates),
            _launch(filter_resolve_kernel, (programs,), common, resolve),
        ]
        scratch: Scratch = {
            "numbers_ptr": ((ROW_NUMBERS.value, B), torch.float32),
            "leaders_ptr": ((B, LEADERS.value), torch.float32),
            "listed_ptr": ((B,), torch.int32),
            "list_ptr": ((B, config.row_room), torch.int32),
        }
        self.run = LaunchSequence(launches, scratch, device)
        self.operands = HeadOperands(
            (blocks_b * 2 * config.block_b, D),
            boxes(2 * config.block_b, config.block_v, config.block_d, copy_by_tma),
            boxes(resolving.block_b, block_v, resolving.block_d, by_tma),
        )

    def __call__(self, call: Call, head: HeadCopy, processed: Processing) -> None:
        """Launch for a call of the same key. processed: that of its request."""
        request, stored, filters, _, out = call
        device = request.hidden.device
        with launching_on(device):
            self.run(
                {
                    **self.operands.arguments(request, head, processed, out),
                    "top_k": filters.top_k,
                    "logits_ptr": stored.logits,
                    "largest_ptr": stored.largest,
                    "counters_ptr": workspace(COUNTERS, device).arrivals,
                }
            )


def _launch(
    kernel: Any, grid: tuple[int, ...], common: dict[str, Any], constants: dict[str, Any]
) -> Launch:
    """Return a launch with these constants and those of the common ones that the kernel has."""
    shared = {name: x for name, x in common.items() if name in kernel.arg_names}
    return Launch(kernel, grid, shared | constants)


def share_of_groups(stride: int) -> int:
    """Return the groups of each program that looks for leaders: a power of two."""
    return max(LEADERS.value, triton.next_power_of_2(stride // 32)) // LISTERS.value
