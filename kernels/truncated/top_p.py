"""Launches of truncated_sample by top-p alone, one p for all rows: see truncated.redraw."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fsbench.kernels.configs.choice import has_tma
from fsbench.kernels.launch.launch_cache import launch_kernel
from fsbench.kernels.launch.operands import per_row
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import TruncatedSample
from fsbench.kernels.launch.workspace import workspace
from fsbench.kernels.truncated import redraw

PROGRAMS = {"test": 1320, "race": 900}
"""Programs of a launch: about what fits on a large GPU at once."""

WARPS = 4

LEFT = 0.02
"""Rows that may be left to one program each, on average."""


def is_alone(filters: Filters) -> bool:
    """Whether top-p is the only filter: one number for all rows, from LEAST on."""
    top_k, top_p, min_p = filters
    if isinstance(top_k, Tensor) or isinstance(top_p, Tensor) or isinstance(min_p, Tensor):
        return False
    return top_k == 0 and min_p <= 0.0 and redraw.LEAST.value <= top_p < 1.0


def tests_needed(top_p: float, B: int) -> int:
    """Return how often many programs test tokens, before one program does what is left.

    top_p: of is_alone. Each race is among the tokens before the last one, so the mass before a
    row's token falls by a factor that is uniform in [0, 1], and it takes the row as many tests to
    have less than p as a Poisson process of rate 1 takes to log(1 / p): the row fails n of them
    with the probability of n events or more. What is left then takes one program a hundred
    microseconds or so.
    """
    events = -math.log(top_p)
    n, chance, fails = 1, top_p, 1.0 - top_p  # of no event; of n or more
    while n == 1 or B * fails > LEFT:
        chance *= events / n
        fails -= chance
        n += 1
    return n


def early(device: torch.device) -> dict[str, bool]:
    """Options of a launch that begins before the one before it has ended, and waits on the device.

    Not on every GPU.
    """
    if device.type == "cuda" and has_tma(device):  # GPUs that have one have the other
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


def launch_redraws(
    request: Request, top_p: float, turns: int, logits: Tensor, sample: TruncatedSample
) -> None:
    """Put kept tokens in place of those in sample.tokens that top-p cuts off.

    turns: tests, of tests_needed, and the races between them; tokens do not depend on how many.
    logits: of StoredLogits.
    sample.tokens: the draws from all tokens.
    """
    (B, stride), device = logits.shape, logits.device
    blocks = -(-stride // redraw.BLOCK.value)
    undecided = torch.empty(turns, B, dtype=torch.int32, device=device)
    largest = torch.empty(B, blocks, dtype=torch.float32, device=device)
    masses = torch.empty(B, blocks, 2, dtype=torch.int64, device=device)
    work = workspace(B, device)
    per = per_row(request)
    for turn in range(turns):
        race = turn % 2 == 1
        most = PROGRAMS["race" if race else "test"]
        # The first time as many for each row; no row has more than blocks.
        each = max(1, min(blocks, most // B))
        launch_kernel(
            redraw.sampling_redraw_kernel,
            device,
            (B * each if turn == 0 else max(B, min(B * blocks, most)),),
            logits_ptr=logits,
            temperature=request.temperature,
            top_p=top_p,
            largest_ptr=largest,
            masses_ptr=masses,
            keys_ptr=work.keys,
            arrivals_ptr=work.arrivals,
            undecided_ptr=undecided,
            seed_ptr=request.seed,
            offset_ptr=request.offset,
            tokens_ptr=sample.tokens,
            valid_ptr=sample.valid,
            turn=turn,
            turns=turns,
            B=B,
            stride=stride,
            blocks=blocks,
            ROWS=max(32, 1 << (B - 1).bit_length()),
            FIRST=turn == 0,
            RACE=race,
            LAST=turn == turns - 1,
            SEED_PER_ROW=per["SEED_PER_ROW"],
            OFFSET_PER_ROW=per["OFFSET_PER_ROW"],
            TEMPERATURE_PER_ROW=per["TEMPERATURE_PER_ROW"],
            num_warps=WARPS,
            **early(device),
        )
