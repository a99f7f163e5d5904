"""Host side of the fused kernels: operands, scratch memory, one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsbench.kernels.call.operands import (
    SAMPLES_AT_ONCE,
    Operands,
    greedy,
    load_operands,
    per_row,
    processing,
)
from fsbench.kernels.call.request import Request
from fsbench.kernels.call.result import Sample
from fsbench.kernels.call.workspace import workspace
from fsbench.kernels.configs.gpu import launching_on
from fsbench.kernels.configs.hopper import HopperConfig
from fsbench.kernels.configs.portable import TileConfig
from fsbench.kernels.device.stored_logits import StoredLogits
from fsbench.kernels.fused import hopper
from fsbench.kernels.fused.portable import flash_sampling_kernel


def _kernel_and_operands(
    request: Request, config: TileConfig | HopperConfig
) -> tuple[Any, Operands]:
    hidden, weight = request.hidden, request.weight
    V = _part(request)[1].num_tokens
    if isinstance(config, HopperConfig):
        # Loaded here: the language it is written in is an experimental part of Triton.
        return hopper.operands.hopper_kernel, hopper.operands.operands(hidden, weight, V, config)
    operands = load_operands(hidden, weight, V, config)
    return flash_sampling_kernel, operands._replace(tiles={**operands.tiles, "SLICE": config.slice})


class _Part(NamedTuple):
    """This GPU's part of the vocabulary, and its line to the other ranks: arguments of a kernel."""

    first_token: int
    num_tokens: int
    buffers: Tensor | None
    counts: Tensor | None
    rank: int
    area: int


def _part(request: Request) -> tuple[int, _Part]:
    """(RANKS of the kernel, the part)."""
    shard = request.shard
    if shard is None:
        return int(not request.merge_later), _Part(0, request.vocab_size, None, None, 0, 0)
    ranks = 0 if request.merge_later else shard.ranks
    first, tokens, rank = shard.first_token, shard.num_tokens, shard.rank
    if ranks <= 1:
        return ranks, _Part(first, tokens, None, None, rank, 0)
    assert shard.line is not None
    return ranks, _Part(first, tokens, shard.line.buffers, shard.line.counts, rank, shard.slots)


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
    hidden, temperature, samples = request.hidden, request.temperature, request.num_samples
    B, D = hidden.shape
    device = hidden.device
    kernel, operands = _kernel_and_operands(request, config)
    at_once = min(samples, SAMPLES_AT_ONCE)
    work = workspace(B * at_once, device)
    winners = masses = None
    if out.logprob is not None:
        winners = torch.empty(operands.programs_v, B, at_once, dtype=torch.float32, device=device)
    if out.logprob is not None or out.logz is not None:
        masses = torch.empty(2, operands.programs_v, B, dtype=torch.float32, device=device)
    bias, row_bias, mask, mask_words = processing(request)
    ranks, part = _part(request)
    with launching_on(device):
        for first_sample in range(0, samples, at_once):
            kernel[operands.grid](
                operands.hidden,
                operands.weight,
                request.seed,
                request.offset,
                temperature,
                request.soft_cap,
                bias,
                row_bias,
                mask,
                work.keys,
                work.arrivals,
                winners,
                masses,
                *out,
                *(stored or (None, None)),
                0 if stored is None else stored.logits.shape[1],
                B,
                request.vocab_size,
                D,
                mask_words,
                samples,
                first_sample,
                *part,
                N=min(at_once, samples - first_sample),
                NOISE="none" if greedy(request) else request.noise,
                **per_row(request),
                RANKS=ranks,
                WATCH=device.type == "cuda",
                **operands.tiles,
            )
