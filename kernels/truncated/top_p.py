"""Launches of truncated_sample by top-p alone: draws until one is kept (truncated.redraw)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fsbench.kernels.call.operands import per_row
from fsbench.kernels.call.prepared import launch_kernel
from fsbench.kernels.call.request import Filters, Request
from fsbench.kernels.call.result import TruncatedSample
from fsbench.kernels.call.workspace import workspace
from fsbench.kernels.configs.choice import has_tma
from fsbench.kernels.truncated import redraw

PROGRAMS = {"before": 1320, "redraw": 900}
"""Programs of a launch: about what fits on a large GPU at once."""

WARPS, REST_WARPS = 4, 16

LEAST = 0.25
"""Below this p a search for the cutoff is faster. It is taken for any number of rows, as sums are
rounded in other places there, and tokens must not depend on the batch."""
FOR_EACH = 3
"""Tests where each row has a p of its own, which the host does not know."""
LEFT = 0.1
"""Rows that may be left to one program each, on average."""


def tests_needed(filters: Filters, B: int) -> int:
    """How often many programs look whether tokens stand, before one program does what is left.

    0: top-p is not the only filter, or so small that a search is faster.

    Each race is among the tokens before the last one, so the mass before a row's token falls by a
    factor that is uniform in [0, 1], and it takes the row as many tests to have less than p as
    a Poisson process of rate 1 takes to log(1 / p): the row fails n of them with the probability of
    n events or more. What is left then takes one program a hundred microseconds or so.
    """
    top_k, top_p, min_p = filters
    if isinstance(top_k, Tensor) or isinstance(min_p, Tensor) or top_k != 0 or min_p > 0.0:
        return 0
    if isinstance(top_p, Tensor):
        return FOR_EACH
    if not LEAST <= top_p < 1.0:
        return 0
    events = -math.log(top_p)
    n, chance, fails = 1, top_p, 1.0 - top_p  # of no event; of n or more
    while n == 1 or B * fails > LEFT:
        chance *= events / n
        fails -= chance
        n += 1
    return n


def early(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it has ended, and wait on the device."""
    return device.type == "cuda" and has_tma(device)  # GPUs that have one have the other


def launch_redraws(
    request: Request, top_p: float | Tensor, turns: int, logits: Tensor, sample: TruncatedSample
) -> None:
    """Put kept tokens in place of those in sample.tokens that top-p cuts off.

    turns: of tests_needed; tokens do not depend on it. logits: of StoredLogits.
    sample.tokens: the draws from all tokens.
    """
    (B, stride), device = logits.shape, logits.device
    blocks = -(-stride // redraw.BLOCK.value)
    undecided = torch.empty(turns, B, dtype=torch.int32, device=device)
    largest = torch.empty(B, blocks, dtype=torch.float32, device=device)
    masses = torch.empty(B, blocks, 2, dtype=torch.int64, device=device)
    work = workspace(B, device)
    per = per_row(request)
    of_all: dict[str, Any] = {
        "logits_ptr": logits,
        "temperature": request.temperature,
        "undecided_ptr": undecided,
        "tokens_ptr": sample.tokens,
        "B": B,
        "stride": stride,
        "blocks": blocks,
        "TEMPERATURE_PER_ROW": per["TEMPERATURE_PER_ROW"],
        "EARLY": early(device),
        **({"launch_pdl": True} if early(device) else {}),
    }
    shared = {
        "arrivals_ptr": work.arrivals,
        "ROWS": max(32, 1 << (B - 1).bit_length()),
        "num_warps": WARPS,
    }
    of_masses = {
        "top_p": top_p,
        "largest_ptr": largest,
        "masses_ptr": masses,
        "TOP_P_PER_ROW": isinstance(top_p, Tensor),
    }
    of_draws: dict[str, Any] = {
        "seed_ptr": request.seed,
        "offset_ptr": request.offset,
        "SEED_PER_ROW": per["SEED_PER_ROW"],
        "OFFSET_PER_ROW": per["OFFSET_PER_ROW"],
    }
    # As many for each row; no row has more than blocks.
    each = max(1, min(blocks, PROGRAMS["before"] // B))
    for turn in range(turns):
        if turn > 0:
            launch_kernel(
                redraw.sampling_redraw_kernel,
                device,
                (max(B, min(B * blocks, PROGRAMS["redraw"])),),
                **of_all,
                **shared,
                **of_draws,
                keys_ptr=work.keys,
                turn=turn - 1,
            )
        launch_kernel(
            redraw.sampling_before_kernel,
            device,
            (B * each,),
            **of_all,
            **shared,
            **of_masses,
            valid_ptr=sample.valid,
            turn=turn,
            turns=turns,
            FIRST=turn == 0,
        )
    launch_kernel(
        redraw.sampling_redraw_rest_kernel,
        device,
        (B,),
        **of_all,
        **of_masses,
        **of_draws,
        turn=turns - 1,
        num_warps=REST_WARPS,
    )
