"""Host side of the fused kernels: operands, scratch memory, one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench.kernels.call.operands import (
    greedy,
    load_operands,
    per_row,
    processing,
)
from fsbench.kernels.call.request import SAMPLES_AT_ONCE, Request
from fsbench.kernels.call.result import Sample
from fsbench.kernels.call.workspace import workspace
from fsbench.kernels.configs.gpu import launching_on
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.device.stored_logits import StoredLogits
from fsbench.kernels.fused import hopper
from fsbench.kernels.fused.portable import flash_sampling_kernel


class _Part(NamedTuple):
    """This GPU's part of the vocabulary, and its line to the other ranks: arguments of a kernel."""

    first_token: int
    num_tokens: int
    buffers_ptr: Tensor | None = None
    counts_ptr: Tensor | None = None
    rank: int = 0
    area: int = 0


def _part(request: Request) -> tuple[int, _Part]:
    """(RANKS of the kernel, the part)."""
    shard = request.shard
    if shard is None:
        return int(not request.merge_later), _Part(0, request.vocab_size)
    ranks = 0 if request.merge_later else shard.ranks
    first, tokens, rank = shard.first_token, shard.num_tokens, shard.rank
    if ranks <= 1:
        return ranks, _Part(first, tokens, rank=rank)
    assert shard.line is not None
    return ranks, _Part(
        first, tokens, shard.line.buffers, shard.line.counts, rank, area=shard.slots
    )


def launch(
    request: Request,
    config: TileConfig | HopperConfig,
    out: Sample,
    stored: StoredLogits | None = None,
) -> None:
    """Run the kernel of a config on a request.

    One launch draws up to SAMPLES_AT_ONCE samples, which share everything but their noise.
    stored: where the logits are written, too.
    """
    hidden, weight, samples = request.hidden, request.weight, request.num_samples
    B, D = hidden.shape
    device = hidden.device
    ranks, part = _part(request)
    kernel: Any
    if isinstance(config, HopperConfig):
        kernel = hopper.operands.hopper_kernel
        operands = hopper.operands.operands(hidden, weight, part.num_tokens, config)
    else:
        kernel = flash_sampling_kernel
        operands = load_operands(hidden, weight, part.num_tokens, config)
        operands.tiles["SLICE"] = config.slice
    at_once = min(samples, SAMPLES_AT_ONCE)
    work = workspace(B * at_once, device)
    winners = masses = None
    if out.logprob is not None:
        winners = torch.empty(operands.programs_v, B, at_once, dtype=torch.float32, device=device)
    if out.logprob is not None or out.logz is not None:
        masses = torch.empty(2, operands.programs_v, B, dtype=torch.float32, device=device)
    logits = processing(request)
    with launching_on(device):
        for first_sample in range(0, samples, at_once):
            kernel[operands.grid](
                hidden=operands.hidden,
                weight=operands.weight,
                seed_ptr=request.seed,
                offset_ptr=request.offset,
                temperature=request.temperature,
                soft_cap=request.soft_cap,
                bias_ptr=logits.bias,
                row_bias_ptr=logits.row_bias,
                mask_ptr=logits.mask,
                keys_ptr=work.keys,
                arrivals_ptr=work.arrivals,
                winners_ptr=winners,
                masses_ptr=masses,
                tokens_ptr=out.tokens,
                valid_ptr=out.valid,
                logprob_ptr=out.logprob,
                logz_ptr=out.logz,
                logits_ptr=None if stored is None else stored.logits,
                largest_ptr=None if stored is None else stored.largest,
                stride=0 if stored is None else stored.logits.shape[1],
                B=B,
                V=request.vocab_size,
                D=D,
                mask_words=logits.mask_words,
                samples=samples,
                first_sample=first_sample,
                N=min(at_once, samples - first_sample),
                NOISE="none" if greedy(request) else request.noise,
                RANKS=ranks,
                WATCH=device.type == "cuda",
                **part._asdict(),
                **per_row(request),
                **operands.tiles,
            )
