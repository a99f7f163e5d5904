"""Launches of truncated_sample by top-p alone: draws until one is kept (truncated.redraw)."""

from __future__ import annotations

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


def is_top_p_alone(filters: Filters) -> bool:
    """Whether top-p is the only filter."""
    top_k, top_p, min_p = filters
    if isinstance(top_k, Tensor) or isinstance(min_p, Tensor) or top_k != 0 or min_p > 0.0:
        return False
    return isinstance(top_p, Tensor) or top_p < 1.0


def early(device: torch.device) -> bool:
    """Whether a launch may begin before the one before it has ended, and wait on the device."""
    return device.type == "cuda" and has_tma(device)  # GPUs that have one have the other


def times(B: int, top_p: float | Tensor) -> int:
    """How often many programs look whether tokens stand, before one program does what is left.

    A second race is rare where few rows need a first one.
    """
    return 2 if not isinstance(top_p, Tensor) and B * (1.0 - top_p) <= 2.0 else 3


def launch_redraws(
    request: Request, top_p: float | Tensor, logits: Tensor, sample: TruncatedSample
) -> None:
    """Put kept tokens in place of those in sample.tokens that top-p cuts off.

    sample.tokens: the draws from all tokens. logits: of StoredLogits.
    """
    (B, stride), device = logits.shape, logits.device
    blocks = -(-stride // redraw.BLOCK.value)
    turns = times(B, top_p)
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
