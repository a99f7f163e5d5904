"""Launches of draft_sample: noise of the head's tokens, and logits at the target's token ids."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fsbench.kernels import fused, truncated
from fsbench.kernels.configs.gpu import launching_on
from fsbench.kernels.device.rows import noise_of_rows
from fsbench.kernels.device.stored_logits import (
    STRIDE_UNIT,
    StoredLogits,
    allocate,
    largest_of_groups,
)
from fsbench.kernels.drafting.vocabulary import DraftVocabulary
from fsbench.kernels.launch.launch_cache import launch_kernel
from fsbench.kernels.launch.operands import per_row
from fsbench.kernels.launch.request import Filters, Request
from fsbench.kernels.launch.result import Sample, TruncatedSample
from fsbench.kernels.noise.contract import bits_of_tokens, gumbel, temperatures
from fsbench.kernels.truncated.penalties import Penalties

TOKENS_AT_ONCE = 1024


@triton.jit(do_not_specialize=["N"])
def draft_noise_kernel(
    ids_ptr,  # [N] int64
    seed_ptr,  # [1] or [B] int64
    offset_ptr,  # [1] or [B] int64, or None: 0
    temperature,  # fp32, or pointer to [B] fp32
    noise_ptr,  # [B, N] fp32, out; NaN in a row of invalid temperature
    N,
    SEED_PER_ROW: tl.constexpr,
    OFFSET_PER_ROW: tl.constexpr,
    TEMPERATURE_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + column, mask=column < N, other=0).to(tl.int32)
    seed, offset, number = noise_of_rows(
        seed_ptr, offset_ptr, row, None, SEED_PER_ROW, OFFSET_PER_ROW
    )
    T, _ = temperatures(tl.load(temperature + row) if TEMPERATURE_PER_ROW else temperature)
    noise = T * gumbel(bits_of_tokens(token, number, seed, offset))
    tl.store(noise_ptr + row.to(tl.int64) * N + column, noise, mask=column < N)


def scaled_noise(request: Request, ids: Tensor) -> Tensor:
    """Return T times the Gumbel of each token of ids [N] for each row of a request: fp32 [B, N]."""
    B, N, device = len(request.hidden), len(ids), ids.device
    noise = torch.empty(B, N, dtype=torch.float32, device=device)
    with launching_on(device):
        launch_kernel(
            draft_noise_kernel,
            device,
            (B, triton.cdiv(N, TOKENS_AT_ONCE)),
            ids_ptr=ids,
            seed_ptr=request.seed,
            offset_ptr=request.offset,
            temperature=request.temperature,
            noise_ptr=noise,
            N=N,
            **per_row(request),
            BLOCK=TOKENS_AT_ONCE,
            num_warps=4,
        )
    return noise


def launch_filtered(
    request: Request,
    vocabulary: DraftVocabulary,
    filters: Filters,
    penalties: Penalties | None,
    out: Sample,
) -> None:
    """Store the draft head's logits with the fused kernel; draw from those that filters keep."""
    hidden, V = request.hidden, vocabulary.vocab_size
    stored = allocate(len(hidden), request.vocab_size, hidden.device, largest=False)
    fused.launch.launch(request, "auto", None, out, stored)
    stride = triton.cdiv(V, STRIDE_UNIT) * STRIDE_UNIT
    logits = vocabulary.spread(stored.logits[:, : request.vocab_size], stride)
    truncated.launch.finish(
        request._replace(vocab_size=V),
        StoredLogits(logits, largest_of_groups(logits)),
        filters,
        penalties,
        TruncatedSample(out.tokens, out.valid),
    )
